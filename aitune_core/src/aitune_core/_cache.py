"""Folders for the files of engines."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import weakref
from pathlib import Path

from aitune_core.errors import ConfigError

__all__ = ["cache_root", "new_work_dir", "remove_with"]

_VARIABLE = "AITUNE_CACHE_DIR"


def cache_root() -> Path:
    """Return aitune's cache folder: ``AITUNE_CACHE_DIR``, or the platform's cache folder."""
    chosen = os.environ.get(_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "aitune"


def new_work_dir(*names: str) -> Path:
    """Make and return an empty folder that no one else uses, under the cache folder.

    Raises:
        ConfigError: The cache folder cannot be written to.
    """
    parent = cache_root().joinpath(*(re.sub(r"[^\w-]+", "_", name)[:80] for name in names[:-1]))
    prefix = re.sub(r"[^\w-]+", "_", names[-1])[:80] + "-"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        msg = (
            f"cannot write to the cache folder {parent}: {error}; set {_VARIABLE} to one that works"
        )
        raise ConfigError(
            msg, field=_VARIABLE, value=str(parent), allowed="a writable folder"
        ) from error


def remove_with(owner: object, folder: Path) -> None:
    """Remove ``folder`` when ``owner`` is garbage-collected or the process ends."""
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)

"""Folders for the files of engines, and what is left of those of processes that were killed."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import Final

from filelock import FileLock

from aitune_core.errors import ConfigError

__all__ = [
    "STALE_SECONDS",
    "cache_root",
    "is_old",
    "new_work_dir",
    "remove_stale_work_dirs",
    "remove_with",
]

_VARIABLE: Final = "AITUNE_CACHE_DIR"
#: Nothing younger is taken for a leftover.
STALE_SECONDS: Final = 24 * 3600
#: At the end of a folder's name: its owner, and what tempfile adds.
_OWNED: Final = re.compile(r"-([0-9a-f]{16})-[a-z0-9_]{8}")


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


class _Owner:
    """This process, to others that look for leftovers: a lock that it holds while it lives.

    Args:
        root: The cache folder.

    Raises:
        OSError: The lock cannot be made.
    """

    def __init__(self, root: Path) -> None:
        self.token = secrets.token_hex(8)
        path = _lock_of(root, self.token)
        lock = FileLock(path, thread_local=False)
        lock.acquire(timeout=0)
        weakref.finalize(self, _release, lock, path, os.getpid())


def _lock_of(root: Path, token: str) -> Path:
    return root / f".owner-{token}.lock"


def _release(lock: FileLock, path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has only a copy
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()


@functools.lru_cache(maxsize=8)
def _owner(root: Path, _pid: int) -> _Owner | None:
    """Return this process as the owner of folders; None where there can be no locks."""
    try:
        return _Owner(root)
    except (OSError, NotImplementedError):
        return None


def new_work_dir(kind: str, name: str) -> Path:
    """Make and return an empty folder that no one else uses, under the cache folder.

    It has a mark of this process in its name, by which others know whether it is left over; where
    there can be no locks, it has none, and is never taken for a leftover.

    Raises:
        ConfigError: The cache folder cannot be written to.
    """
    root = cache_root()
    parent = root / _file_name(kind)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        owner = _owner(root, os.getpid())
        mark = "" if owner is None else f"{owner.token}-"
        return Path(tempfile.mkdtemp(prefix=f"{_file_name(name)}-{mark}", dir=parent))
    except OSError as error:
        msg = (
            f"cannot write to the cache folder {parent}: {error}; set {_VARIABLE} to one that works"
        )
        raise ConfigError(
            msg, field=_VARIABLE, value=str(parent), allowed="a writable folder"
        ) from error


def _file_name(name: str) -> str:
    return re.sub(r"[^\w-]+", "_", name)[:80]


def remove_with(owner: object, folder: Path) -> None:
    """Remove a folder of `new_work_dir` when ``owner`` is garbage-collected or the process ends."""
    # The process counts as alive as long as one of its folders is there.
    weakref.finalize(owner, _remove, folder, _owner(folder.parents[1], os.getpid()))


def _remove(folder: Path, _process: _Owner | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def is_old(path: Path) -> bool:
    """Whether a file or folder is there and was last changed more than a day ago."""
    try:
        return time.time() - path.stat().st_mtime > STALE_SECONDS
    except OSError:
        return False


def remove_stale_work_dirs() -> None:
    """Remove folders of `new_work_dir` whose processes ended without removing them.

    Nothing is removed that is younger than a day, or where locks do not hold, as on some network
    file systems.
    """
    root = cache_root()
    owner = _owner(root, os.getpid())
    if owner is None:
        return
    own = _lock_of(root, owner.token)
    if _is_free(own):
        return
    # Some versions of filelock write to the files of locks that they try.
    old = [lock for lock in root.glob(".owner-*.lock") if is_old(lock)]
    for folder in root.glob("*/*"):
        found = _OWNED.search(folder.name)
        if found is None or found.end() != len(folder.name) or not is_old(folder):
            continue
        lock = _lock_of(root, found.group(1))
        if lock != own and (not lock.exists() or _is_free(lock)):
            shutil.rmtree(folder, ignore_errors=True)
    for lock in old:
        if _is_free(lock):
            with contextlib.suppress(OSError):
                lock.unlink()


def _is_free(path: Path) -> bool:
    """Whether no living process holds a lock."""
    try:
        with FileLock(path, timeout=0):
            return True
    except OSError:  # Timeout is one
        return False

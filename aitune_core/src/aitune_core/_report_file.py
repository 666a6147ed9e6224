"""Writing the page of a report: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

from aitune_core._report import TuneRecord
from aitune_core.errors import MissingExtraError, ReportError

__all__ = ["write_page"]

_INSTALL: Final = 'pip install "aitune-core[report]"'


def write_page(report: TuneRecord, path: str | os.PathLike[str]) -> Path:
    """Write a report as one HTML file.

    Raises:
        MissingExtraError: The packages that draw the charts are not installed.
        ReportError: The file cannot be written.
    """
    target = Path(path)
    if target.is_dir():
        msg = f"{target} is a folder; give the name of a file in it, such as {target / 'r.html'}"
        raise ReportError(msg, path=str(target), expected="a file", got="a folder")
    text = _rendered(report)
    try:
        handle, temporary = tempfile.mkstemp(prefix=".report.", dir=target.parent)
    except OSError as error:
        raise _not_written(target, error) from error
    try:
        with open(handle, "w", encoding="utf-8") as stream:  # noqa: PTH123 - of a descriptor
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(target)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise _not_written(target, error) from error
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target


def _rendered(report: TuneRecord) -> str:
    try:
        from aitune_core._page.render import rendered  # noqa: PLC0415 - needs the extra
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("aitune_core"):
            raise
        msg = f"to_html needs the package {error.name!r}, which is not installed; run {_INSTALL}"
        raise MissingExtraError(
            msg, extra="report", missing=error.name, install_hint=_INSTALL
        ) from error
    return rendered(report)


def _not_written(target: Path, error: OSError) -> ReportError:
    msg = (
        f"the report cannot be written to {target}: {error.strerror or error}; give a path in a "
        "folder that exists and can be written to"
    )
    return ReportError(msg, path=str(target), expected="a path that can be written", got=str(error))

"""The file of a checkpoint: an uncompressed zip with a manifest that lists every other file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

from aitune_core.errors import CheckpointError, CheckpointFormatError, CheckpointIntegrityError

__all__ = [
    "FileEntry",
    "check_members",
    "describe_file",
    "extract",
    "opened",
    "read_manifest",
    "write_archive",
]

_MANIFEST: Final = "manifest.json"
_MANIFEST_HASH: Final = "manifest.json.sha256"
_MAX_MANIFEST_BYTES: Final = 64 * 1024 * 1024
_CHUNK_BYTES: Final = 1024 * 1024
_TIME: Final = (1980, 1, 1, 0, 0, 0)
_READ_ERRORS: Final = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    UnicodeDecodeError,
    ValueError,
    OSError,
)

#: Size and SHA-256 of a file, as the manifest stores them.
FileEntry = dict[str, Any]


def describe_file(path: Path) -> FileEntry:
    """Return size in bytes and SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        size = sum(len(chunk) for chunk in _chunks(stream, digest))
    return {"size_bytes": size, "sha256": digest.hexdigest()}


def _chunks(stream: IO[bytes], digest: Any) -> Iterator[bytes]:  # noqa: ANN401
    while chunk := stream.read(_CHUNK_BYTES):
        digest.update(chunk)
        yield chunk


def write_archive(target: Path, manifest: Mapping[str, Any], files: Mapping[str, Path]) -> None:
    """Write a checkpoint: beside the target under a temporary name, then renamed.

    Args:
        target: The file to make or replace.
        manifest: JSON-able content of the manifest; must list every file.
        files: The files by their name in the archive.

    Raises:
        CheckpointError: The target is a folder, or cannot be written; it is left as it was.
    """
    if target.exists() and not target.is_file():
        kind = "a folder" if target.is_dir() else "no regular file"
        msg = f"cannot save to {str(target)!r}: it is {kind}; give a file name such as model.ait"
        raise CheckpointError(msg, path=str(target), expected="a file name", got=kind)
    if not target.parent.is_dir():
        msg = f"cannot save to {str(target)!r}: the folder {str(target.parent)!r} does not exist"
        raise CheckpointError(msg, path=str(target), expected="a folder", got="nothing")
    try:
        text = json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"cannot save to {str(target)!r}: what an engine stores must be JSON, but {error}"
        raise CheckpointError(msg, path=str(target), expected="JSON", got=str(error)) from error
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name[:100]}.", dir=target.parent)
        with os.fdopen(handle, "wb") as stream:
            with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
                archive.writestr(zipfile.ZipInfo(_MANIFEST, _TIME), text)
                archive.writestr(
                    zipfile.ZipInfo(_MANIFEST_HASH, _TIME), hashlib.sha256(text).hexdigest()
                )
                for name, source in files.items():
                    _write_member(archive, name, source)
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(target)
        temporary = None
    except OSError as error:
        msg = f"cannot save to {str(target)!r}: {error}; what was there is unchanged"
        raise CheckpointError(msg, path=str(target), got=str(error)) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()


def _write_member(archive: zipfile.ZipFile, name: str, source: Path) -> None:
    info = zipfile.ZipInfo(name, _TIME)
    info.file_size = source.stat().st_size
    with source.open("rb") as stream, archive.open(info, "w", force_zip64=True) as member:
        while chunk := stream.read(_CHUNK_BYTES):
            member.write(chunk)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a checkpoint for reading; whatever is wrong with the file is a `CheckpointError`."""
    if not path.is_file():
        state = "is no regular file" if path.exists() else "does not exist"
        state = "is a folder" if path.is_dir() else state
        msg = f"cannot load {str(path)!r}: it {state}"
        raise CheckpointError(msg, path=str(path), expected="a checkpoint file", got=state)
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except CheckpointError as error:
        error.path = str(path)
        raise
    except _READ_ERRORS as error:
        msg = f"cannot load {str(path)!r}: it is not a readable aitune checkpoint ({error})"
        raise CheckpointFormatError(
            msg, path=str(path), expected="an aitune checkpoint", got=str(error)
        ) from error


def read_manifest(archive: zipfile.ZipFile) -> dict[str, Any]:
    """Return the verified manifest of an open checkpoint.

    Raises:
        CheckpointFormatError: There is none, or it is no JSON object.
        CheckpointIntegrityError: It does not match its hash.
    """
    names = archive.namelist()
    if names.count(_MANIFEST) != 1 or names.count(_MANIFEST_HASH) != 1:
        msg = (
            "the file is no aitune checkpoint, which is what aitune_core.save writes: it holds no "
            f"{_MANIFEST} with a {_MANIFEST_HASH}"
        )
        raise CheckpointFormatError(msg, expected=_MANIFEST, got=names[:20])
    if archive.getinfo(_MANIFEST).file_size > _MAX_MANIFEST_BYTES:
        msg = f"{_MANIFEST} is larger than {_MAX_MANIFEST_BYTES} bytes"
        raise CheckpointFormatError(msg, expected=_MAX_MANIFEST_BYTES)
    with archive.open(_MANIFEST) as stream:
        text = stream.read(_MAX_MANIFEST_BYTES)
    with archive.open(_MANIFEST_HASH) as stream:
        expected = stream.read(128)
    found = hashlib.sha256(text).hexdigest()
    if expected != found.encode():
        msg = f"{_MANIFEST} was changed: its SHA-256 is {found}, {_MANIFEST_HASH} says {expected!r}"
        raise CheckpointIntegrityError(msg, expected=expected, got=found)
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"{_MANIFEST} is no JSON: {error}"
        raise CheckpointFormatError(msg, expected="JSON", got=str(error)) from error
    if not isinstance(manifest, dict):
        msg = f"{_MANIFEST} must be a JSON object, got {type(manifest).__name__}"
        raise CheckpointFormatError(msg, expected="an object", got=type(manifest).__name__)
    return manifest


def check_members(archive: zipfile.ZipFile, listed: Mapping[str, FileEntry]) -> None:
    """Check that the archive holds what the manifest lists, and nothing else.

    Raises:
        CheckpointIntegrityError: A file is missing, unlisted, doubled, a link, or of another size.
        CheckpointFormatError: A name leaves the archive's folder.
    """
    infos = archive.infolist()
    names = [info.filename for info in infos]
    expected = sorted([*listed, _MANIFEST, _MANIFEST_HASH])
    if sorted(names) != expected:
        surplus = sorted(set(names) - set(expected)) or sorted(
            name for name in set(names) if names.count(name) > 1
        )
        missing = sorted(set(expected) - set(names))
        msg = f"files differ from the manifest: missing {missing}, not listed or doubled {surplus}"
        raise CheckpointIntegrityError(msg, expected=expected, got=sorted(names))
    for info in infos:
        path = PurePosixPath(info.filename)
        if (
            str(path) != info.filename
            or path.is_absolute()
            or ".." in path.parts
            or "\\" in info.filename
            or ":" in info.filename
        ):
            msg = f"the name {info.filename!r} leaves the checkpoint"
            raise CheckpointFormatError(msg, expected="a relative path", got=info.filename)
        if stat.S_ISLNK(info.external_attr >> 16) or info.compress_type != zipfile.ZIP_STORED:
            msg = f"{info.filename!r} is a link or compressed; checkpoints hold neither"
            raise CheckpointFormatError(msg, expected="a stored file", got=info.filename)


def extract(archive: zipfile.ZipFile, name: str, entry: FileEntry, target: Path) -> None:
    """Write one file of an open checkpoint to ``target``, verified on the way.

    Raises:
        CheckpointIntegrityError: Its size or SHA-256 differs from the manifest.
    """
    size = archive.getinfo(name).file_size
    if size != entry["size_bytes"]:
        msg = f"{name!r} has {size} bytes, the manifest says {entry['size_bytes']}"
        raise CheckpointIntegrityError(msg, expected=entry["size_bytes"], got=size)
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with archive.open(name) as stream, target.open("xb") as out:
        for chunk in _chunks(stream, digest):
            out.write(chunk)
    if digest.hexdigest() != entry["sha256"]:
        found = digest.hexdigest()
        msg = f"{name!r} was changed: SHA-256 {found}, the manifest says {entry['sha256']}"
        raise CheckpointIntegrityError(msg, expected=entry["sha256"], got=found)

"""The store of finished builds: engines' files by content, between processes."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from filelock import FileLock, Timeout

from aitune_core._archive import FileEntry, describe_file
from aitune_core._cache import cache_root, is_old, remove_stale_work_dirs
from aitune_core._spec_json import graph_from_json, graph_to_json
from aitune_core.backend import ArtifactWriter, Engine, checked_name
from aitune_core.errors import CheckpointFormatError, CheckpointIntegrityError, ConfigError
from aitune_core.specs import GraphSpec, dtype_name

__all__ = ["BuildStore", "StoredBuild"]

_VARIABLE: Final = "AITUNE_CACHE_MAX_BYTES"
_DEFAULT_BYTES: Final = 20 * 1024**3
_FORMAT_VERSION: Final = 1
_MANIFEST: Final = "manifest.json"
_FILES: Final = "files"
_TEMPORARY: Final = ".tmp-"
_KEY: Final = re.compile(r"[0-9a-f]{64}")
_MAX_MANIFEST_BYTES: Final = 64 * 1024 * 1024


@attrs.frozen(kw_only=True)
class StoredBuild:
    """An engine that was stored, besides its files.

    Attributes:
        graph: What it accepts and returns.
        compute_dtype: As of `Engine`.
        files: Names of its files.
        data: What it stored besides.
        attempts: How it was built: steps that led on, in words.
        build_seconds: How long that took.
        created: When it was stored, in UTC, to the second.
    """

    graph: GraphSpec
    compute_dtype: torch.dtype | None
    files: tuple[str, ...]
    data: Mapping[str, Any]
    attempts: tuple[str, ...]
    build_seconds: float
    created: str


class BuildStore:
    """Finished builds in the cache folder, one folder per key.

    An entry is written under another name and renamed when it is whole. Whoever takes it gets
    links to its files, which are read-only, or copies: neither removing nor replacing an entry
    touches what a live engine uses. What was not used for longest is removed where entries take
    more than ``AITUNE_CACHE_MAX_BYTES``, 20 GiB unless set.

    Raises:
        ConfigError: The variable is no number of bytes.
    """

    def __init__(self) -> None:
        self._root = cache_root() / "builds"
        self._max_bytes = _max_bytes()

    @property
    def is_open(self) -> bool:
        """Whether anything may be kept at all."""
        return self._max_bytes > 0

    @contextlib.contextmanager
    def locked(self, key: str, seconds: float | None) -> Iterator[None]:
        """Hold the lock of a key; one that a killed process held is free.

        Args:
            key: The key.
            seconds: How long to wait for another holder; None means as long as it takes.

        Raises:
            TimeoutError: Another one still holds it.
            OSError, NotImplementedError: There can be no lock here.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        path = self._lock(key)
        lock = FileLock(path)
        lock.acquire(timeout=-1 if seconds is None else max(seconds, 0.0))
        try:
            yield
        finally:
            if not self._entry(key).exists():
                # One who waits for this very file sees that it is gone, or works beside another.
                _unlink(path)
            lock.release()

    def fetch(self, key: str, folder: Path) -> StoredBuild | None:
        """Put the verified files of an entry into a folder; with the key's lock.

        Returns:
            What was stored; None where there is nothing of this key.

        Raises:
            CheckpointFormatError: The manifest is malformed, or of another version.
            CheckpointIntegrityError: Manifest or files are not as they were written.
            OSError: Something cannot be read.
        """
        entry = self._entry(key)
        if not entry.exists():
            return None
        content = _read_manifest(entry / _MANIFEST)
        try:
            files: dict[str, FileEntry] = content["files"]
            for name, described in files.items():
                target = folder / checked_name(name)
                target.parent.mkdir(parents=True, exist_ok=True)
                _link_or_copy(entry / _FILES / name, target)
                _verify(name, target, described)
            compute = content["compute_dtype"]
            found = StoredBuild(
                graph=graph_from_json(content["graph"]),
                compute_dtype=None if compute is None else getattr(torch, compute),
                files=tuple(files),
                data=content["data"],
                attempts=tuple(content["attempts"]),
                build_seconds=float(content["build_seconds"]),
                created=str(content["created"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            msg = f"the manifest is malformed: {error!r:.200}"
            raise CheckpointFormatError(msg, got=repr(error)) from error
        with contextlib.suppress(OSError):  # read-only
            os.utime(entry / _MANIFEST)
        return found

    def keep(
        self,
        key: str,
        engine: Engine,
        artifacts: ArtifactWriter,
        *,
        attempts: tuple[str, ...],
        build_seconds: float,
    ) -> None:
        """Store an engine; with the key's lock.

        Raises:
            OSError: There is no room, or it cannot be written.
            TypeError, ValueError: What the engine stores is no JSON.
            TreeError: Its graph cannot be stored.
        """
        compute = engine.compute_dtype
        content: dict[str, Any] = {
            "graph": graph_to_json(engine.graph),
            "backend": engine.backend_name,
            "compute_dtype": None if compute is None else dtype_name(compute),
            "data": artifacts.data,
            "attempts": list(attempts),
            "build_seconds": build_seconds,
            "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        }
        text = _canonical(content)
        if graph_from_json(json.loads(text)["graph"]) != engine.graph:
            msg = "its graph would not be the same when it is read again"
            raise ValueError(msg)
        self._make_room(
            sum(source.stat().st_size for source in artifacts.files.values()) + len(text)
        )
        temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self._root))
        try:
            content["files"] = {
                name: _copied(source, temporary / _FILES / name)
                for name, source in artifacts.files.items()
            }
            manifest = temporary / _MANIFEST
            manifest.write_text(
                json.dumps(
                    {
                        "format": "aitune-build",
                        "format_version": _FORMAT_VERSION,
                        "sha256": _hash(content),
                        "content": content,
                    },
                    indent=1,
                ),
                encoding="utf-8",
            )
            _sync(manifest)
            for folder in (*temporary.rglob("*/"), temporary):
                _sync(folder)
            temporary.rename(self._entry(key))
            _sync(self._root)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._tidy()

    def drop(self, key: str) -> None:
        """Remove an entry, if there is one; with the key's lock."""
        self._remove(self._entry(key))

    def _entry(self, key: str) -> Path:
        return self._root / key

    def _lock(self, key: str) -> Path:
        return self._root / f"{key}.lock"

    def _remove(self, entry: Path) -> None:
        """Remove an entry: renamed first, so that it is never there in part."""
        with contextlib.suppress(OSError):
            doomed = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self._root))
            with contextlib.suppress(OSError):
                entry.rename(doomed / "entry")
            shutil.rmtree(doomed, ignore_errors=True)

    def _make_room(self, wanted: int) -> None:
        """Remove what was not used for longest until there is room.

        Raises:
            OSError: There never is so much.
        """
        if wanted > self._max_bytes:
            msg = f"{wanted} bytes are more than the {self._max_bytes} of {_VARIABLE}"
            raise OSError(msg)
        entries = sorted(
            (_last_use(entry), _size(entry), entry)
            for entry in self._root.iterdir()
            if _KEY.fullmatch(entry.name)
        )
        total = sum(size for _, size, _ in entries) + wanted
        for _, size, entry in entries:
            if total <= self._max_bytes:
                return
            if self._evicted(entry):
                total -= size

    def _evicted(self, entry: Path) -> bool:
        """Remove an entry, unless someone works with it at the moment."""
        path = self._lock(entry.name)
        with contextlib.suppress(OSError), FileLock(path, timeout=0):
            self._remove(entry)
            if not entry.exists():
                _unlink(path)
                return True
        return False

    def _tidy(self) -> None:
        """Remove what killed processes left; never fails."""
        with contextlib.suppress(OSError, NotImplementedError, ConfigError):
            for path in self._root.glob(f"{_TEMPORARY}*"):
                if is_old(path):
                    shutil.rmtree(path, ignore_errors=True)
            for path in self._root.glob("*.lock"):
                if is_old(path) and not path.with_suffix("").exists():
                    with contextlib.suppress(Timeout), FileLock(path, timeout=0):
                        _unlink(path)
            remove_stale_work_dirs()


def _max_bytes() -> int:
    chosen = os.environ.get(_VARIABLE)
    if not chosen:
        return _DEFAULT_BYTES
    if not chosen.strip().isdecimal():
        allowed = "a number of bytes, such as 20000000000; 0 keeps nothing"
        msg = f"{_VARIABLE} must be {allowed}, got {chosen!r}"
        raise ConfigError(msg, field=_VARIABLE, value=chosen, allowed=allowed)
    return int(chosen)


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, allow_nan=False)


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(content).encode()).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    with path.open(encoding="utf-8") as stream:
        text = stream.read(_MAX_MANIFEST_BYTES)
    try:
        whole = json.loads(text)
        version, content, expected = whole["format_version"], whole["content"], whole["sha256"]
        found = _hash(content)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        msg = f"the manifest is malformed: {error!r:.200}"
        raise CheckpointFormatError(msg, got=repr(error)) from error
    if version != _FORMAT_VERSION:
        msg = f"it has format version {version!r:.20}, expected {_FORMAT_VERSION}"
        raise CheckpointFormatError(msg, expected=_FORMAT_VERSION, got=version)
    if found != expected:
        msg = f"the manifest was changed: its SHA-256 is {found}, expected {expected!r:.80}"
        raise CheckpointIntegrityError(msg, expected=expected, got=found)
    if not isinstance(content, dict):
        msg = f"the manifest must hold an object, got {type(content).__name__}"
        raise CheckpointFormatError(msg, expected="an object", got=type(content).__name__)
    return content


def _verify(name: str, path: Path, expected: FileEntry) -> None:
    if not stat.S_ISREG(path.lstat().st_mode):
        msg = f"{name!r} is no regular file"
        raise CheckpointIntegrityError(msg, expected="a regular file", got=name)
    found = describe_file(path)
    if found != expected:
        msg = f"{name!r} was changed: it is {found}, expected {expected}"
        raise CheckpointIntegrityError(msg, expected=expected, got=found)


def _link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name where the file system can; else copy it."""
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except (OSError, NotImplementedError):
        shutil.copyfile(source, target, follow_symlinks=False)


def _copied(source: Path, target: Path) -> FileEntry:
    """Copy a file to the disk; no link, since the engine may go on to write to its own."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    if os.name != "nt":  # which cannot remove read-only files
        target.chmod(0o444)
    _sync(target)
    return describe_file(target)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    if path.is_dir() and os.name == "nt":
        return
    # Windows flushes only what is open for writing.
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _last_use(entry: Path) -> float:
    try:
        return (entry / _MANIFEST).stat().st_mtime
    except OSError:
        return 0.0


def _size(entry: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):  # another process removes it
        total = sum(path.stat().st_size for path in entry.rglob("*") if path.is_file())
    return total


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()

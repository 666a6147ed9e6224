"""Building an engine, or restoring the same one from an earlier tuning."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

import attrs

from aitune_core._build_key import build_key
from aitune_core._builds import BuildStore
from aitune_core._identity import TensorHashes, UnknownContentError
from aitune_core._trees import TreeError
from aitune_core.backend import (
    ArtifactReader,
    ArtifactWriter,
    Attempt,
    Backend,
    BuildRequest,
    Engine,
)
from aitune_core.errors import BackendUnavailableError, CheckpointError

__all__ = ["Builds", "Built", "build"]

_log = logging.getLogger(__name__)

_FIND: Final = "find an earlier build"
_KEEP: Final = "keep the build"
#: For another process that builds the same; one that was stopped would be waited for forever.
_MAX_WAIT_SECONDS: Final = 3600.0
#: Compares an engine with eager; raises where it is none or differs.
_Check: TypeAlias = Callable[[Engine], object]


@attrs.frozen(kw_only=True)
class Built:
    """A checked engine.

    Attributes:
        engine: The engine.
        build_seconds: Time that building it took; 0 where it was restored.
        load_seconds: Time that finding and restoring it took; None where it was built. Neither
            has the check in it.
    """

    engine: Engine
    build_seconds: float = 0.0
    load_seconds: float | None = None

    @property
    def reused(self) -> bool:
        """Whether it was restored and not built."""
        return self.load_seconds is not None


class Builds:
    """The finished builds that one tuning finds and leaves behind.

    Raises:
        ConfigError: A setting of the store cannot be used.
    """

    def __init__(self) -> None:
        self._store = BuildStore()
        self._tensors = TensorHashes()

    def build_or_reuse(
        self,
        backend: Backend,
        request: BuildRequest,
        *,
        check: _Check,
        failure: Exception | None = None,
    ) -> Built:
        """Restore the engine that an earlier tuning built of the same, or build and keep it.

        A restored engine is checked like a new one; where it cannot be restored or fails, it is
        removed from the store and built anew. Whatever is wrong with the store never fails a
        build. ``request.record_attempt`` is told what was found, and what could not be kept.

        Args:
            backend: The candidate.
            request: What to build; its ``work_dir`` gets the files in either case.
            check: Compares an engine with eager; raises where it differs.
            failure: What was wrong with the engine that was restored before, which is removed
                for it.

        Raises:
            Exception: What the backend raises where it cannot build, or ``check`` of a new engine.
        """
        start = time.perf_counter()
        key = self._key(backend, request) if self._store.is_open else None
        if key is None:
            return build(backend, request, check=check)
        with self._locked(key, request) as locked:
            if not locked:
                return build(backend, request, check=check)
            if failure is None:
                restored = self._restored(key, backend, request, check, start)
                if restored is not None:
                    return restored
            else:
                self._drop(key, request, failure)
            return self._built_and_kept(key, backend, request, check)

    def _key(self, backend: Backend, request: BuildRequest) -> str | None:
        try:
            return build_key(backend, request, self._tensors)
        except UnknownContentError as error:
            detail = f"builds of it can be neither found nor kept: {error}"
            request.record_attempt(Attempt(_FIND, succeeded=False, detail=detail))
            return None

    @contextlib.contextmanager
    def _locked(self, key: str, request: BuildRequest) -> Iterator[bool]:
        """Hold the lock of a key; yields whether that could be."""
        left = request.seconds_left()
        seconds = _MAX_WAIT_SECONDS if left is None else min(left, _MAX_WAIT_SECONDS)
        with contextlib.ExitStack() as stack:
            problem = ""
            try:
                stack.enter_context(self._store.locked(key, seconds))
            except TimeoutError:
                problem = f"another process has been building the same for {seconds:.0f} s"
            except (OSError, NotImplementedError) as error:
                problem = f"builds can be neither found nor kept: {error}"
            if problem:
                request.record_attempt(Attempt(_FIND, succeeded=False, detail=problem))
            yield not problem

    def _restored(
        self, key: str, backend: Backend, request: BuildRequest, check: _Check, start: float
    ) -> Built | None:
        """Restore and check an engine; None where there is none that is as it should be."""
        engine: Engine | None = None
        try:
            stored = self._store.fetch(key, request.work_dir)
            if stored is None:
                return None
            reader = ArtifactReader(request.work_dir, stored.files, stored.data)
            engine = backend.load(reader, stored.graph, request.device)
            found = (engine.graph, engine.compute_dtype)
            if found != (stored.graph, stored.compute_dtype):
                msg = f"{backend!r} restored another engine than was stored: {found}"
                raise CheckpointError(msg, expected=stored.graph, got=engine.graph)  # noqa: TRY301
            built = Built(engine=engine, load_seconds=time.perf_counter() - start)
            check(engine)
        except BackendUnavailableError:
            raise  # it cannot be built here either
        except Exception as error:  # noqa: BLE001 - whatever is wrong, it is built anew
            _close(engine)
            _empty(request.work_dir)
            self._drop(key, request, error)
            return None
        except BaseException:
            _close(engine)
            raise
        detail = "; ".join(
            (f"built in {stored.build_seconds:.1f} s, {stored.created}", *stored.attempts)
        )
        request.record_attempt(Attempt(_FIND, succeeded=True, detail=detail))
        return built

    def _drop(self, key: str, request: BuildRequest, error: Exception) -> None:
        self._store.drop(key)
        detail = f"removed, since it cannot be used again: {error}"
        request.record_attempt(Attempt(_FIND, succeeded=False, detail=detail))

    def _built_and_kept(
        self, key: str, backend: Backend, request: BuildRequest, check: _Check
    ) -> Built:
        attempts: list[Attempt] = []

        def record(attempt: Attempt) -> None:
            attempts.append(attempt)
            request.record_attempt(attempt)

        built = build(backend, attrs.evolve(request, record_attempt=record), check=check)
        artifacts = ArtifactWriter()
        try:
            built.engine.save(artifacts)
        except CheckpointError:  # engines of this kind cannot be stored
            return built
        except BaseException:
            _close(built.engine)
            raise
        try:
            self._store.keep(
                key,
                built.engine,
                artifacts,
                attempts=tuple(
                    f"{attempt.step} ({attempt.detail})" if attempt.detail else attempt.step
                    for attempt in attempts
                    if attempt.succeeded
                ),
                build_seconds=built.build_seconds,
            )
        except (OSError, TypeError, ValueError, RecursionError, TreeError) as error:
            request.record_attempt(Attempt(_KEEP, succeeded=False, detail=str(error)))
        except BaseException:
            _close(built.engine)
            raise
        return built


def build(backend: Backend, request: BuildRequest, *, check: _Check) -> Built:
    """Build and check an engine, whatever there is of earlier tunings.

    Raises:
        Exception: What the backend raises where it cannot build, or ``check``.
    """
    start = time.perf_counter()
    engine = backend.build(request)
    built = Built(engine=engine, build_seconds=time.perf_counter() - start)
    try:
        check(engine)
    except BaseException:
        _close(engine)
        raise
    return built


def _close(engine: object) -> None:
    """Close an engine that is not used; what went wrong before is what counts."""
    if not isinstance(engine, Engine):
        return
    try:
        engine.close()
    except Exception:  # noqa: BLE001 - whatever a backend raises here
        _log.exception("an engine of %s cannot be closed", engine.backend_name)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

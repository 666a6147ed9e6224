"""Trying candidates for one graph: build, check, measure."""

from __future__ import annotations

import functools
import logging
import shutil
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import attrs
import torch

from aitune_core._cache import new_work_dir, remove_with
from aitune_core._graphs import RecordedGraph
from aitune_core._keeping import broken_limit, grown
from aitune_core._reference import Reference
from aitune_core._reuse import Builds, build
from aitune_core._stopwatch import memory_in_use
from aitune_core._synthesis import resize_inputs
from aitune_core._timing import Timing
from aitune_core._tolerances import Tolerance
from aitune_core._validation import EngineCheck
from aitune_core.backend import Attempt, Backend, BuildRequest, Engine
from aitune_core.errors import BuildError, ConfigError
from aitune_core.limits import Limits
from aitune_core.results import CheckResult, Measurement, Outcome, Ratio, StepSeconds
from aitune_core.specs import GraphSpec
from aitune_core.strategy import Trial

__all__ = ["GraphTrial"]

_log = logging.getLogger(__name__)

_Passed: TypeAlias = weakref.WeakKeyDictionary[Engine, CheckResult]


class GraphTrial(Trial):
    """The candidates of one graph.

    Args:
        module_name: Name used in errors and folders.
        recorded: The graph with its samples.
        backends: The candidates.
        device: Where engines must run.
        limits: What candidates may take.
        deadline: Time of `time.perf_counter` after which no candidate is begun; None is no limit.
        started: Called when a candidate is about to be built.
        finished: Called with what became of it.
        measuring: Called with candidates that are about to be timed.
        tolerance: Relative errors that the user allows.
        builds: Where finished builds are found and kept; None builds all anew.

    Raises:
        ConfigError: Memory is limited, and cannot be told here.
    """

    def __init__(  # noqa: PLR0913
        self,
        module_name: str,
        recorded: RecordedGraph,
        backends: tuple[Backend, ...],
        device: torch.device,
        *,
        started: Callable[[Backend], object],
        finished: Callable[[Outcome], object],
        measuring: Callable[[Sequence[Outcome]], object] = lambda _: None,
        limits: Limits | None = None,
        deadline: float | None = None,
        tolerance: Tolerance | None = None,
        builds: Builds | None = None,
    ) -> None:
        self.graph = recorded.spec
        self.backends = backends
        self.outcomes: list[Outcome] = []
        self._module_name = module_name
        self._recorded = recorded
        self._device = device
        self._builds = builds
        self._started = started
        self._finished = finished
        self._measuring = measuring
        self._limits = Limits() if limits is None else limits
        self._deadline = deadline
        self._timing = Timing(recorded, device, self.seconds_left)
        self._reference = Reference(
            recorded.spec, recorded.samples, recorded.results, recorded.reference, module_name
        )
        self._check = EngineCheck(
            recorded.spec, recorded.samples, self._reference, recorded.declared, tolerance
        )
        if self._limits.max_memory_bytes is not None and memory_in_use(device) is None:
            msg = "max_memory_bytes: the memory of a process cannot be told here; leave it out"
            raise ConfigError(msg, field="max_memory_bytes", value=self._limits.max_memory_bytes)

    @property
    def eager(self) -> Measurement | None:
        """What was measured of eager last."""
        return self._timing.eager

    def seconds_left(self) -> float | None:
        """Return the seconds in which a candidate may begin; None is no limit."""
        return None if self._deadline is None else self._deadline - time.perf_counter()

    def prepare(self) -> None:
        """Compute the eager reference.

        Raises:
            RecordingError: Eager is not repeatable, or depends on the way a call is made.
        """
        self._reference.cases()

    def build(self, backend: Backend) -> Outcome:
        """Build and check a candidate."""
        outcome = self._built(backend)
        self._finished(outcome)
        return outcome

    def evaluate(self, backend: Backend) -> Outcome:
        """Build, check and measure a candidate."""
        outcome = self._built(backend)
        if outcome.succeeded:
            (outcome,) = self.measure([outcome])
        if outcome.succeeded and outcome.measurement is None:
            (outcome,) = self.measure([outcome])  # built anew, as an earlier build did not run
        self._finished(outcome)
        return outcome

    def skip(self, backend: Backend, reason: str) -> Outcome:
        """Note that a candidate is not tried, and why."""
        outcome = Outcome(backend=backend, not_tried=reason)
        self.outcomes.append(outcome)
        return outcome

    def measure(
        self,
        outcomes: Sequence[Outcome],
        batch_sizes: Sequence[int | None] | None = None,
        *,
        burst: bool = False,
    ) -> tuple[Outcome, ...]:
        """Time correct candidates and eager until the fastest is clear."""
        start = time.perf_counter()
        self._measuring(outcomes)
        with torch.no_grad():
            timed = self._timing.measure(outcomes, batch_sizes, burst=burst)
        return self._noted(outcomes, timed, time.perf_counter() - start)

    def sweep(self, outcomes: Sequence[Outcome], *, burst: bool = False) -> tuple[Outcome, ...]:
        """Time correct candidates and eager at batch sizes that grow."""
        start = time.perf_counter()
        self._measuring(outcomes)
        with torch.no_grad():
            timed = self._timing.sweep(outcomes, burst=burst)
        return self._noted(outcomes, timed, time.perf_counter() - start)

    def compare(self, first: Outcome, second: Outcome | None = None) -> Ratio:
        """Return how many times as fast one is as another, in the rounds that ran last."""
        return self._timing.compare(first, second)

    def _noted(
        self, before: Sequence[Outcome], after: Sequence[Outcome], seconds: float
    ) -> tuple[Outcome, ...]:
        """Keep outcomes in place of what they were."""
        noted = []
        for old, timed in zip(before, after, strict=True):
            steps = attrs.evolve(timed.seconds, measure=timed.seconds.measure + seconds)
            new = self._within_limits(attrs.evolve(timed, seconds=steps))
            if new.error is not None and old.engine is not None:
                _close(old.engine)
                if timed.error is not None and old.reused:
                    new = self._within_limits(self._evaluated(old.backend, timed.error))
            for place, outcome in enumerate(self.outcomes):
                if outcome is old:
                    self.outcomes[place] = new
            noted.append(new)
        return tuple(noted)

    def _built(self, backend: Backend) -> Outcome:
        left = self.seconds_left()
        if left is not None and left <= 0:
            return self.skip(backend, f"time_limit_s = {self._limits.time_limit_s:g} is over")
        self._started(backend)
        outcome = self._within_limits(self._evaluated(backend))
        self.outcomes.append(outcome)
        return outcome

    def _within_limits(self, outcome: Outcome) -> Outcome:
        """Return an outcome, as a failure where it breaks a limit."""
        if outcome.engine is None:
            return outcome
        broken = broken_limit(outcome, self._limits)
        if broken is None:
            return outcome
        _close(outcome.engine)
        return attrs.evolve(outcome, engine=None, error=broken)

    def _evaluated(self, backend: Backend, failure: Exception | None = None) -> Outcome:
        attempts: list[Attempt] = []
        work_dir = new_work_dir(backend.name, f"{self._module_name}-{self.graph.name}")
        engine: Engine | None = None
        passed: _Passed = weakref.WeakKeyDictionary()
        memory = memory_in_use(self._device)
        check_seconds = 0.0
        start = time.perf_counter()

        def check_engine(engine: Engine) -> None:
            nonlocal check_seconds
            self._check_engine(backend, engine)
            if engine not in passed:
                begun = time.perf_counter()
                passed[engine] = self._check(engine)
                check_seconds += time.perf_counter() - begun

        try:
            request = self.request(work_dir, attempts, passed)
            with torch.no_grad():
                built = (
                    build(backend, request, check=check_engine)
                    if self._builds is None
                    else self._builds.build_or_reuse(
                        backend, request, check=check_engine, failure=failure
                    )
                )
                engine = built.engine
                tables = tuple(engine.tables())
        except Exception as error:  # noqa: BLE001 - a candidate that fails costs only itself
            if engine is not None:
                _close(engine)
            shutil.rmtree(work_dir, ignore_errors=True)
            return Outcome(
                backend=backend,
                error=error,
                seconds=StepSeconds(build=time.perf_counter() - start),
                attempts=tuple(attempts),
            )
        except BaseException:
            shutil.rmtree(work_dir, ignore_errors=True)
            raise
        remove_with(engine, work_dir)
        return Outcome(
            backend=backend,
            engine=engine,
            check=passed[engine],
            seconds=StepSeconds(
                build=built.build_seconds, check=check_seconds, load=built.load_seconds
            ),
            memory_bytes=grown(memory, memory_in_use(self._device)),
            reused=built.reused,
            attempts=tuple(attempts),
            tables=tables,
        )

    def request(
        self,
        work_dir: Path,
        attempts: list[Attempt] | None = None,
        passed: _Passed | None = None,
    ) -> BuildRequest:
        """Return what a backend gets.

        Args:
            work_dir: An empty folder.
            attempts: Where ways of building are noted.
            passed: Where engines that pass the numeric check are noted.
        """
        attempts = [] if attempts is None else attempts
        passed = weakref.WeakKeyDictionary() if passed is None else passed

        def check(engine: Engine) -> CheckResult:
            passed[engine] = self._check(engine)
            return passed[engine]

        return BuildRequest(
            module=self._recorded.flat_module,
            graph=self.graph,
            samples=self._recorded.samples,
            device=self._device,
            work_dir=work_dir,
            inputs_at=functools.partial(resize_inputs, self.graph, self._recorded.samples),
            check=check,
            needed_conditions=self._check.needed,
            latencies=self._timing.latencies,
            record_attempt=attempts.append,
            seconds_left=self.seconds_left,
        )

    def _check_engine(self, backend: Backend, engine: object) -> None:
        if not isinstance(engine, Engine) or not _built_for(self.graph, engine.graph):
            msg = (
                f"backend {backend.name!r} built {engine!r} instead of an Engine for "
                f"{self.graph.name!r}"
            )
            raise BuildError(msg, backend_name=backend.name, step="build")


def _built_for(wanted: GraphSpec, graph: GraphSpec) -> bool:
    """Whether an engine's graph is the wanted one, apart from limits on sizes that it added."""
    added = graph.conditions[len(wanted.conditions) :]
    return attrs.evolve(wanted, conditions=(*wanted.conditions, *added)) == graph


def _close(engine: Engine) -> None:
    """Close a failed engine; its failure is what counts, not that of closing it."""
    try:
        engine.close()
    except Exception:  # noqa: BLE001 - whatever a backend raises here
        _log.exception("an engine of %s cannot be closed", engine.backend_name)

"""Trying candidates for one graph: build, check, measure."""

from __future__ import annotations

import functools
import logging
import shutil
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import attrs
import torch
from torch import Tensor

from aitune_core._cache import new_work_dir, remove_with
from aitune_core._dispatch import Dispatcher, TunedGraph
from aitune_core._graphs import RecordedGraph
from aitune_core._measurement import measure
from aitune_core._reference import Reference
from aitune_core._synthesis import resize_inputs
from aitune_core._tolerances import Tolerance
from aitune_core._validation import EngineCheck
from aitune_core.backend import Attempt, Backend, BuildRequest, Engine
from aitune_core.errors import BuildError
from aitune_core.results import CheckResult, Measurement, Outcome, StepSeconds
from aitune_core.specs import GraphSpec
from aitune_core.strategy import Trial

__all__ = ["GraphTrial"]

_log = logging.getLogger(__name__)

_MAX_TIMED_SAMPLES: Final = 8
#: For a backend that chooses between engines of its own.
_SECONDS_FOR_A_CHOICE: Final = 0.5
_Passed: TypeAlias = weakref.WeakKeyDictionary[Engine, CheckResult]


class GraphTrial(Trial):
    """The candidates of one graph.

    Args:
        module_name: Name used in errors and folders.
        recorded: The graph with its samples.
        backends: The candidates.
        device: Where engines must run.
        started: Called when a candidate is about to be built.
        finished: Called with what became of it.
        tolerance: Relative errors that the user allows.
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
        tolerance: Tolerance | None = None,
    ) -> None:
        self.graph = recorded.spec
        self.backends = backends
        self.outcomes: list[Outcome] = []
        #: Latencies of eager, in the rounds that were timed last.
        self.eager: Measurement | None = None
        self._module_name = module_name
        self._recorded = recorded
        self._device = device
        self._started = started
        self._finished = finished
        self._reference = Reference(
            recorded.spec, recorded.samples, recorded.results, recorded.reference, module_name
        )
        self._check = EngineCheck(
            recorded.spec, recorded.samples, self._reference, recorded.declared, tolerance
        )

    def prepare(self) -> None:
        """Compute the eager reference.

        Raises:
            RecordingError: Eager is not repeatable, or depends on the way a call is made.
        """
        self._reference.cases()

    def evaluate(self, backend: Backend) -> Outcome:
        """Build, check and measure a candidate."""
        self._started(backend)
        outcome = self._evaluated(backend)
        self.outcomes.append(outcome)
        self._finished(outcome)
        return outcome

    def _evaluated(self, backend: Backend) -> Outcome:
        attempts: list[Attempt] = []
        work_dir = new_work_dir(backend.name, f"{self._module_name}-{self.graph.name}")
        engine: Engine | None = None
        passed: _Passed = weakref.WeakKeyDictionary()
        start = time.perf_counter()
        try:
            with torch.no_grad():
                engine = backend.build(self._request(work_dir, attempts, passed))
                self._check_engine(backend, engine)
            build_seconds = time.perf_counter() - start
            check = passed.get(engine) or self._check(engine)
            measurement, eager = self._measured(backend, engine)
            self.eager = eager
        except Exception as error:  # noqa: BLE001 - a candidate that fails costs only itself
            if isinstance(engine, Engine):
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
            check=check,
            measurement=measurement,
            eager=eager,
            seconds=StepSeconds(build=build_seconds),
            attempts=tuple(attempts),
        )

    def _request(self, work_dir: Path, attempts: list[Attempt], passed: _Passed) -> BuildRequest:
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
            latencies=self._latencies,
            record_attempt=attempts.append,
        )

    def _latencies(self, engines: Sequence[Engine]) -> list[float]:
        samples = _spread(self._recorded.samples)
        with torch.no_grad():
            measured = measure(
                [
                    [functools.partial(engine.run, sample) for sample in samples]
                    for engine in engines
                ],
                self._device,
                _SECONDS_FOR_A_CHOICE,
            )
        return [measurement.p50_ms for measurement in measured]

    def _check_engine(self, backend: Backend, engine: object) -> None:
        if not isinstance(engine, Engine) or not _built_for(self.graph, engine.graph):
            msg = (
                f"backend {backend.name!r} built {engine!r} instead of an Engine for "
                f"{self.graph.name!r}"
            )
            raise BuildError(msg, backend_name=backend.name, step="build")

    def _measured(self, backend: Backend, engine: Engine) -> tuple[Measurement, Measurement]:
        recorded = self._recorded
        calls = [recorded.arguments(sample) for sample in _spread(recorded.samples)]
        dispatcher = Dispatcher(recorded.call_form, [TunedGraph(backend, engine)])
        with torch.no_grad():
            tuned, eager = measure(
                [
                    [functools.partial(dispatcher.call, args, kwargs) for args, kwargs in calls],
                    [
                        functools.partial(recorded.module.forward, *args, **kwargs)
                        for args, kwargs in calls
                    ],
                ],
                self._device,
            )
        return tuned, eager


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


def _spread(samples: Sequence[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """Return a few samples from the smallest to the largest."""
    ordered = sorted(samples, key=lambda sample: sum(tensor.numel() for tensor in sample))
    last = len(ordered) - 1
    steps = min(last, _MAX_TIMED_SAMPLES - 1)
    return [ordered[step * last // steps] for step in range(steps + 1)] if steps else ordered

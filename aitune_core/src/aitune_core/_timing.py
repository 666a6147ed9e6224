"""Timing the candidates of one graph beside eager, as the user calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from aitune_core._dispatch import Dispatcher, TunedGraph
from aitune_core._graphs import RecordedGraph
from aitune_core._measurement import Contest, Executable, measure
from aitune_core._stopwatch import stopwatch_for
from aitune_core._sweep import batch_dim, batch_sizes, rows_of, sweep
from aitune_core._synthesis import resize_inputs
from aitune_core.backend import Engine
from aitune_core.results import BatchPoint, Measurement, Outcome, Ratio

__all__ = ["Timing"]

_MAX_TIMED_SAMPLES: Final = 8
#: For a backend that chooses between engines of its own.
_SECONDS_FOR_A_CHOICE: Final = 0.5


class Timing:
    """Times engines of one graph and the eager module.

    Args:
        recorded: The graph with its samples.
        device: Where they run.
        seconds_left: Seconds that timing may still take; None is no limit.

    Attributes:
        eager: What was measured of eager last; None before.
    """

    def __init__(
        self,
        recorded: RecordedGraph,
        device: torch.device,
        seconds_left: Callable[[], float | None],
    ) -> None:
        self._recorded = recorded
        self._stopwatch = stopwatch_for(device)
        self._seconds_left = seconds_left
        self.eager: Measurement | None = None
        self._contest: Contest | None = None
        self._places: dict[Engine, int] = {}

    def latencies(self, engines: Sequence[Engine]) -> list[float]:
        """Return the median latency of some engines of one backend, in milliseconds."""
        samples = _spread(self._recorded.samples)
        rows = [rows_of(self._recorded.spec, sample) for sample in samples]
        with torch.no_grad():
            measured = measure(
                [
                    Executable([functools.partial(engine.run, sample) for sample in samples], rows)
                    for engine in engines
                ],
                self._stopwatch,
                _SECONDS_FOR_A_CHOICE,
            )
        return [measurement.p50_ms for measurement in measured]

    def measure(
        self,
        outcomes: Sequence[Outcome],
        batch_sizes: Sequence[int | None] | None,
        *,
        burst: bool,
    ) -> list[Outcome]:
        """As `Trial.measure`; a candidate that fails has an error and no engine."""
        sizes = batch_sizes or [None] * (len(outcomes) + 1)
        calls = [self._eager_call, *(self._engine_call(outcome) for outcome in outcomes)]
        executables = [
            self._executable(call, self._samples(size))
            for call, size in zip(calls, sizes, strict=True)
        ]
        contest = Contest(
            executables, self._stopwatch, by_rows=batch_sizes is not None, burst=burst
        )
        left = self._seconds_left()
        contest.run(None if left is None else max(0.0, min(left, contest.budget_seconds)))
        failed = contest.error(0)
        if failed is not None:
            raise failed
        self._contest = contest
        self._places = {
            outcome.engine: place
            for place, outcome in enumerate(outcomes, 1)
            if outcome.engine is not None
        }
        self.eager = attrs.evolve(contest.measurement(0), batches=_batches(self.eager))
        return [
            self._measured(outcome, contest, place) for place, outcome in enumerate(outcomes, 1)
        ]

    def _measured(self, outcome: Outcome, contest: Contest, place: int) -> Outcome:
        error = contest.error(place)
        if error is not None:
            return attrs.evolve(outcome, engine=None, error=error)
        return attrs.evolve(
            outcome,
            measurement=attrs.evolve(
                contest.measurement(place), batches=_batches(outcome.measurement)
            ),
            eager=self.eager,
            ratio=contest.ratio(place, 0),
        )

    def sweep(self, outcomes: Sequence[Outcome], *, burst: bool) -> list[Outcome]:
        """As `Trial.sweep`; a candidate that fails has an error and no engine."""
        graph = self._recorded.spec
        if batch_dim(graph) is None:
            return list(outcomes)
        sizes = batch_sizes(graph, lambda some: self._taken(outcomes, some))
        calls = [self._eager_call, *(self._engine_call(outcome) for outcome in outcomes)]

        def at(call: Callable[..., Any], size: int) -> Executable:
            return self._executable(call, self._samples(size))

        swept = sweep(
            [functools.partial(at, call) for call in calls],
            sizes,
            self._stopwatch,
            burst=burst,
            seconds_left=self._seconds_left,
        )
        (points, failed), *others = swept
        if failed is not None:
            raise failed
        self.eager = _swept(points)
        return [
            attrs.evolve(outcome, engine=None, error=error)
            if error is not None
            else attrs.evolve(outcome, measurement=_swept(points))
            for outcome, (points, error) in zip(outcomes, others, strict=True)
        ]

    def compare(self, first: Outcome, second: Outcome | None) -> Ratio:
        """As `Trial.compare`."""
        if self._contest is None:
            msg = "compare comes after measure"
            raise RuntimeError(msg)
        places = [
            self._places[each.engine] if each and each.engine else 0 for each in (first, second)
        ]
        return self._contest.ratio(*places)

    def _taken(self, outcomes: Sequence[Outcome], some: Mapping[str, int]) -> bool:
        """Whether all engines take a size."""
        graph = self._recorded.spec
        sizes = graph.dim_sizes(self._inputs(some))
        engines = [outcome.engine for outcome in outcomes if outcome.engine is not None]
        return not any(each.graph.broken_condition(sizes) for each in engines)

    def _inputs(self, sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
        return resize_inputs(self._recorded.spec, self._recorded.samples, sizes)

    def _samples(self, size: int | None) -> list[tuple[Tensor, ...]]:
        dim = batch_dim(self._recorded.spec)
        if size is None or dim is None:
            return _spread(self._recorded.samples)
        return [self._inputs({dim.name: size})]

    def _executable(
        self, call: Callable[..., Any], samples: Sequence[tuple[Tensor, ...]]
    ) -> Executable:
        calls = []
        for sample in samples:
            args, kwargs = self._recorded.arguments(sample)
            calls.append(functools.partial(call, args, kwargs))
        return Executable(calls, [rows_of(self._recorded.spec, sample) for sample in samples])

    def _eager_call(self, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        return self._recorded.module.forward(*args, **kwargs)

    def _engine_call(self, outcome: Outcome) -> Callable[..., Any]:
        graphs = [] if outcome.engine is None else [TunedGraph(outcome.backend, outcome.engine)]
        return Dispatcher(self._recorded.call_form, graphs).call


def _batches(measurement: Measurement | None) -> tuple[BatchPoint, ...]:
    return () if measurement is None else measurement.batches


def _swept(points: tuple[BatchPoint, ...]) -> Measurement | None:
    """Return the points of a sweep with the figures of the one with most samples per second."""
    timed = [point for point in points if point.p50_ms is not None]
    if not timed:
        return None
    best = max(timed, key=lambda point: point.samples_per_second or 0.0)
    return Measurement(
        p50_ms=best.p50_ms or 0.0,
        p90_ms=best.p90_ms or 0.0,
        p99_ms=best.p99_ms or 0.0,
        calls=0,
        samples_per_second=best.samples_per_second or 0.0,
        batch_size=best.batch_size,
        peak_memory_bytes=best.peak_memory_bytes,
        batches=points,
    )


def _spread(samples: Sequence[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """Return a few samples from the smallest to the largest."""
    ordered = sorted(samples, key=lambda sample: sum(tensor.numel() for tensor in sample))
    last = len(ordered) - 1
    steps = min(last, _MAX_TIMED_SAMPLES - 1)
    return [ordered[step * last // steps] for step in range(steps + 1)] if steps else ordered

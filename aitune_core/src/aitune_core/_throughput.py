"""The strategies for throughput: as much as possible, or as much as a latency budget allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from aitune_core._choice import build_all, decision, fastest, speed
from aitune_core.backend import Backend
from aitune_core.errors import ConfigError
from aitune_core.limits import checked_number
from aitune_core.results import BatchPoint, Decision, Measurement, Outcome
from aitune_core.strategy import BackendSource, Strategy, Trial, checked_flag

__all__ = ["LatencyBudgetStrategy", "MaxThroughputStrategy"]

_PERCENTILES = (50, 90, 99)


class MaxThroughputStrategy(Strategy):
    """Use the backend that gets most samples through per second.

    Every candidate is built and checked. Those that are correct, and eager, are timed at batch
    sizes that double through the range of the batch dim, each until its samples per second stop
    growing or memory ends; running out of memory ends only that. Then each is timed at its own
    best batch size, beside the others in interleaved rounds, and the times per sample are
    compared. On CUDA, calls do not wait for one another. Where a graph has no batch dim, the
    recorded calls are timed. A candidate wins when it is better than eager and than each candidate
    before it in order, by the whole confidence interval of their ratio. Where none is, nothing
    wins: `tune` raises, or keeps eager, as ``on_failure`` says.

    Args:
        backends: Candidates, the simplest first; None means every available backend: those of
            plugins by name, then ``inductor``.
        allow_slower: Let the best correct candidate win, even where eager is better.
        **limits: The fields of `Limits`.

    Raises:
        ConfigError: The sequence is empty, or an entry or a limit cannot be used.
    """

    name: ClassVar[str] = "max_throughput"

    def __init__(
        self,
        backends: Sequence[BackendSource] | None = None,
        *,
        allow_slower: bool = False,
        **limits: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(backends, **limits)
        self.allow_slower = checked_flag("allow_slower", allow_slower)

    def decide(self, trial: Trial) -> Decision:
        """Build all, sweep batch sizes, time each at its best one, take the best."""
        swept = _correct(trial.sweep(build_all(trial), burst=True))
        sizes = [_most_samples(trial.eager), *(_most_samples(each.measurement) for each in swept)]
        outcomes = trial.measure(swept, sizes if any(sizes) else None, burst=True)
        winner, lost = fastest(trial, outcomes, allow_slower=self.allow_slower)
        if winner is None:
            reason = "no candidate gets more samples through than eager for sure"
            return decision(trial, None, lost, reason)
        return decision(
            trial, winner, lost, f"most samples per second{_at(winner)}; {speed(winner.ratio)}"
        )


class LatencyBudgetStrategy(Strategy):
    """Use the backend that gets most samples through per second within a latency.

    As `MaxThroughputStrategy`, but of each candidate, and of eager, only batch sizes count at
    which a percentile of the latency is within the budget; calls wait for one another. A candidate
    that is over the budget when it is timed again tries the next smaller size. Where a graph has
    no batch dim, the recorded calls must be within the budget. Where eager is over the budget, the
    best candidate within it wins, whatever its speed beside eager. Where no candidate is within
    it, or none is better than eager, nothing wins: `tune` raises, or keeps eager, as
    ``on_failure`` says.

    Args:
        latency_budget_ms: Latency of a call, in milliseconds.
        backends: Candidates, the simplest first; None means every available backend: those of
            plugins by name, then ``inductor``.
        percentile: Which share of the calls must be within the budget: 50, 90 or 99.
        **limits: The fields of `Limits`.

    Raises:
        ConfigError: The budget is not a finite number above 0, the percentile is none of these,
            the sequence is empty, or an entry or a limit cannot be used.
    """

    name: ClassVar[str] = "latency_budget"

    def __init__(
        self,
        latency_budget_ms: float,
        backends: Sequence[BackendSource] | None = None,
        *,
        percentile: int = 99,
        **limits: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(backends, **limits)
        self.latency_budget_ms = float(checked_number("latency_budget_ms", latency_budget_ms))
        if percentile not in _PERCENTILES or isinstance(percentile, bool):
            msg = f"percentile must be one of {_PERCENTILES}, got {percentile!r}"
            raise ConfigError(msg, field="percentile", value=percentile, allowed=_PERCENTILES)
        self.percentile = int(percentile)

    def decide(self, trial: Trial) -> Decision:
        """Build all, sweep batch sizes, time each at its best one in the budget, take the best."""
        measured, lost = self._within_budget(trial, _correct(trial.sweep(build_all(trial))))
        eager_holds = self._holds(trial.eager)
        winner, behind = fastest(trial, measured, allow_slower=not eager_holds)
        lost.update(behind)
        budget = f"p{self.percentile} within {self.latency_budget_ms:g} ms"
        if winner is None:
            reason = (
                f"no candidate with {budget} gets more samples through than eager for sure"
                if measured
                else f"no candidate has its {budget}"
            )
            return decision(trial, None, lost, reason)
        beside = speed(winner.ratio) if eager_holds else "eager is over the budget"
        reason = f"most samples per second with {budget}{_at(winner)}; {beside}"
        return decision(trial, winner, lost, reason)

    def _within_budget(
        self, trial: Trial, swept: Sequence[Outcome]
    ) -> tuple[list[Outcome], dict[Backend, str]]:
        """Return what keeps to the budget at its best batch size, and why the rest does not."""
        options = {each.backend: self._options(each.measurement) for each in swept}
        eager_size = next(iter(self._options(trial.eager)), _smallest(trial.eager))
        left, lost = list(swept), dict[Backend, str]()
        while True:
            for each in left:
                if not options[each.backend]:
                    lost[each.backend] = self._over(each.measurement)
            left = [each for each in left if each.backend not in lost]
            sizes = [eager_size, *(options[each.backend][0] for each in left)]
            left = _correct(trial.measure(left, sizes if any(sizes) else None))
            over = [each for each in left if not self._holds(each.measurement)]
            if not over:
                return left, lost
            for each in over:
                del options[each.backend][0]

    def _latency(self, timed: Measurement | BatchPoint | None) -> float | None:
        latency: float | None = getattr(timed, f"p{self.percentile}_ms", None)
        return latency

    def _holds(self, timed: Measurement | BatchPoint | None) -> bool:
        latency = self._latency(timed)
        return latency is not None and latency <= self.latency_budget_ms

    def _options(self, measurement: Measurement | None) -> list[int | None]:
        """Return batch sizes to try, best first; None stands for the recorded calls."""
        if measurement is None or not measurement.batches:
            return [None]
        points = [point for point in measurement.batches if self._holds(point)]
        points.sort(key=lambda point: -(point.samples_per_second or 0.0))
        # After the best one, smaller ones: larger ones take longer.
        return [point.batch_size for point in points if point.batch_size <= points[0].batch_size]

    def _over(self, measurement: Measurement | None) -> str:
        points = () if measurement is None else measurement.batches
        every = map(self._latency, points or (measurement,))
        latencies = [latency for latency in every if latency is not None]
        least = f"{min(latencies):.3g} ms" if latencies else "not measured"
        return (
            f"over the latency budget: its least p{self.percentile} is {least}, "
            f"{self.latency_budget_ms:g} ms are allowed"
        )


def _correct(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.succeeded]


def _most_samples(measurement: Measurement | None) -> int | None:
    """Return the batch size with most samples per second; None where none was swept."""
    points = [] if measurement is None else measurement.batches
    timed = [point for point in points if point.samples_per_second is not None]
    if not timed:
        return None
    return max(timed, key=lambda point: point.samples_per_second or 0.0).batch_size


def _smallest(measurement: Measurement | None) -> int | None:
    points = () if measurement is None else measurement.batches
    return min((point.batch_size for point in points), default=None)


def _at(outcome: Outcome) -> str:
    size = None if outcome.measurement is None else outcome.measurement.batch_size
    return "" if size is None else f", at batch size {size}"

"""What becomes of candidates: checks, measurements, outcomes, decisions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import attrs

from aitune_core.backend import Attempt, Backend, Engine, EngineTable

__all__ = [
    "BatchPoint",
    "CheckResult",
    "Decision",
    "Measurement",
    "Outcome",
    "Ratio",
    "StepSeconds",
]


@attrs.frozen(kw_only=True)
class CheckResult:
    """The numeric check of an engine that passed it.

    Attributes:
        cases: Number of inputs on which it was compared with the reference.
        worst_difference: Largest absolute difference of any output element.
        worst_output: Path of the output with the largest share of its tolerance.
        worst_case: Which inputs gave that share, in words.
        worst_index: Where in the output it is, one index per axis.
        tolerance_share: Largest difference as a share of what was allowed, 0 to 1.
        error: Largest relative error of any output element on recorded calls: its distance from
            the reference, over the element's size plus the typical size of its output.
        allowed_error: What was allowed of it, on the output and call that it is from.
        eager_error: The same of eager in the module's own dtypes; 0 where eager is the reference.
        reference: What was compared with: ``"float64"`` or ``"float32"`` for eager computed in
            that precision, ``"eager"`` for eager as it is.
        skipped: Synthetic inputs that eager itself refused, in words.
    """

    cases: int
    worst_difference: float
    worst_output: str
    tolerance_share: float
    worst_case: str = ""
    worst_index: tuple[int, ...] = ()
    error: float = 0.0
    allowed_error: float = 0.0
    eager_error: float = 0.0
    reference: str = "eager"
    skipped: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class BatchPoint:
    """One executable at one batch size.

    Attributes:
        batch_size: Rows per call.
        p50_ms: Median latency of a call; None where it did not run.
        p90_ms: 90th percentile.
        p99_ms: 99th percentile.
        samples_per_second: Rows per second; None where it did not run.
        peak_memory_bytes: Device memory in use at most; None where it is not measured.
        error: Why it did not run, such as ``"out of memory"``.
    """

    batch_size: int
    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None
    samples_per_second: float | None = None
    peak_memory_bytes: int | None = None
    error: str = ""


@attrs.frozen(kw_only=True)
class Measurement:
    """Calls of one executable, timed as the user makes them, in milliseconds.

    Attributes:
        p50_ms: Median latency.
        p90_ms: 90th percentile.
        p99_ms: 99th percentile.
        calls: Number of timed calls.
        calls_per_second: Calls that end per second, made one after the other.
        samples_per_second: Rows along the batch axis that end per second.
        batch_size: Rows per call, where all timed calls have as many; None where they differ.
        peak_memory_bytes: Device memory in use at most during the calls; None on a CPU.
        times_ms: The latencies, at most 512 of them, in the order in which they were taken.
        batches: The same executable at other batch sizes, where those were measured.
    """

    p50_ms: float
    p90_ms: float
    p99_ms: float
    calls: int
    calls_per_second: float = 0.0
    samples_per_second: float = 0.0
    batch_size: int | None = None
    peak_memory_bytes: int | None = None
    times_ms: tuple[float, ...] = ()
    batches: tuple[BatchPoint, ...] = ()


@attrs.frozen(kw_only=True)
class Ratio:
    """How many times as fast one executable is as another, from paired rounds.

    Attributes:
        value: Mean of the middle half of the rounds' ratios; above 1 where the first is faster.
        low: Lower end of the confidence interval.
        high: Upper end.
        confidence: Probability that the interval covers the true ratio, such as 0.99.
        rounds: Number of rounds.
    """

    value: float
    low: float
    high: float
    confidence: float
    rounds: int

    @property
    def faster(self) -> bool:
        """Whether the whole interval is above 1."""
        return self.low > 1.0

    @property
    def slower(self) -> bool:
        """Whether the whole interval is below 1."""
        return self.high < 1.0


@attrs.frozen(kw_only=True)
class StepSeconds:
    """Time that a candidate took, in seconds.

    Attributes:
        build: Building, whether it succeeded or not.
        check: The numeric check.
        measure: Timing, of this candidate and those beside it.
        load: Restoring the engine from its files; None where that was not done.
    """

    build: float = 0.0
    check: float = 0.0
    measure: float = 0.0
    load: float | None = None


@attrs.frozen(kw_only=True)
class Outcome:
    """What became of a candidate.

    Attributes:
        backend: The candidate.
        engine: The checked engine; None where the candidate failed or was not tried.
        error: Why it failed; None where it did not.
        not_tried: Why it was not built, such as a time limit; empty where it was.
        check: Result of the numeric check; None where it failed.
        measurement: Its latencies; None where they were not measured.
        eager: Latencies of the eager module, measured in the same interleaved rounds.
        ratio: How many times as fast as eager it is; None where that was not measured.
        seconds: Time that it took, by step.
        memory_bytes: Memory that it took to build, check and run: device memory on CUDA, the
            growth of the process on a CPU; None where it cannot be told.
        reused: Whether the engine was restored from an earlier tuning and not built anew.
        attempts: The ways of building that the backend tried.
        tables: What the engine says of itself.
    """

    backend: Backend
    engine: Engine | None = None
    error: Exception | None = None
    not_tried: str = ""
    check: CheckResult | None = None
    measurement: Measurement | None = None
    eager: Measurement | None = None
    ratio: Ratio | None = None
    seconds: StepSeconds = attrs.field(factory=StepSeconds)
    memory_bytes: int | None = None
    reused: bool = False
    attempts: tuple[Attempt, ...] = ()
    tables: tuple[EngineTable, ...] = ()

    @property
    def succeeded(self) -> bool:
        """Whether the candidate has a correct engine."""
        return self.engine is not None

    @property
    def speedup(self) -> float | None:
        """How many times as fast as eager; None where not measured."""
        if self.ratio is not None:
            return self.ratio.value
        if self.measurement is None or self.eager is None:
            return None
        return self.eager.p50_ms / self.measurement.p50_ms


#: For each candidate that lost, one sentence that says why.
_Lost: TypeAlias = Mapping[Backend, str]


@attrs.frozen
class Decision:
    """A strategy's choice for one graph.

    Attributes:
        winner: The outcome whose engine serves the graph; None keeps eager.
        reason: One sentence that says why.
        lost: Candidates that did not win, each with one sentence that says why.
    """

    winner: Outcome | None
    reason: str
    lost: _Lost = attrs.field(factory=dict, kw_only=True)

"""What a tuning did, as a record."""

from __future__ import annotations

import json
import math
import traceback
from typing import Any, Final

import attrs

from aitune_core._environment import EnvironmentReport
from aitune_core.backend import Attempt, EngineTable
from aitune_core.results import CheckResult, Decision, Measurement, Outcome, Ratio, StepSeconds

__all__ = [
    "CandidateReport",
    "GraphReport",
    "ModuleReport",
    "TuneReport",
]

#: How much of a line is shown, in characters.
_LINE_LENGTH: Final = 300


@attrs.frozen(kw_only=True)
class CandidateReport:
    """What became of one candidate for one graph.

    Attributes:
        backend: Name of the backend.
        options: Its configuration.
        status: ``"won"``, ``"lost"``, ``"failed"`` or ``"not tried"``.
        reason: One sentence that says why it has that status.
        error: Why it failed, with the chain of causes; None where it did not.
        check: Result of the numeric check.
        measurement: Latencies of its engine.
        ratio: How many times as fast as eager it is.
        seconds: Time that it took, by step.
        memory_bytes: Memory that it took; None where it cannot be told.
        reused: Whether the engine was restored from an earlier tuning.
        attempts: Ways of building that it tried.
        tables: What the engine says of itself.
    """

    backend: str
    options: dict[str, Any]
    status: str
    reason: str
    error: str | None = None
    check: CheckResult | None = None
    measurement: Measurement | None = None
    ratio: Ratio | None = None
    seconds: StepSeconds = attrs.field(factory=StepSeconds)
    memory_bytes: int | None = None
    reused: bool = False
    attempts: tuple[Attempt, ...] = ()
    tables: tuple[EngineTable, ...] = ()

    @classmethod
    def of(cls, outcome: Outcome, decision: Decision) -> CandidateReport:
        """Record an outcome without its engine."""
        status, reason = _status(outcome, decision)
        return cls(
            backend=outcome.backend.name,
            options=outcome.backend.config.to_options(),
            status=status,
            reason=reason,
            error=None if outcome.error is None else _error_chain(outcome.error),
            check=outcome.check,
            measurement=outcome.measurement,
            ratio=outcome.ratio,
            seconds=outcome.seconds,
            memory_bytes=outcome.memory_bytes,
            reused=outcome.reused,
            attempts=outcome.attempts,
            tables=outcome.tables,
        )


def _status(outcome: Outcome, decision: Decision) -> tuple[str, str]:
    """Return what became of a candidate, and one sentence that says why."""
    if outcome.not_tried:
        return "not tried", outcome.not_tried
    if outcome.error is not None:
        return "failed", _first_line(str(outcome.error) or type(outcome.error).__name__)
    if decision.winner is not None and outcome.engine is decision.winner.engine:
        return "won", decision.reason
    return "lost", decision.lost.get(outcome.backend, decision.reason)


def _error_chain(error: BaseException) -> str:
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(parts) < 5:  # noqa: PLR2004
        text = "".join(traceback.format_exception_only(current)).strip()
        parts.append(text)
        current = current.__cause__
    return "\n  caused by: ".join(parts)


@attrs.frozen(kw_only=True)
class GraphReport:
    """One graph of a module.

    Attributes:
        name: Name of the graph.
        strategy: The strategy that decided it.
        inputs: Its tensors, with dtype, shape and dims in words.
        dims: Its dims with their ranges, in words.
        constants: Arguments that are no tensors and not at their defaults, such as ``"k = 3"``.
        conditions: What sizes must meet besides, for the winner to take the call.
        samples: Number of recorded calls.
        eager: Latencies of eager, in the rounds that decided; None where nothing was measured.
        candidates: What became of each candidate that was tried.
        winner: Name of the backend that serves it; None keeps eager.
        reason: Why, in one sentence.
    """

    name: str
    inputs: tuple[str, ...]
    dims: tuple[str, ...]
    samples: int
    constants: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    strategy: str = ""
    eager: Measurement | None = None
    candidates: tuple[CandidateReport, ...] = ()
    winner: str | None = None
    reason: str = ""


@attrs.frozen(kw_only=True)
class ModuleReport:
    """One wrapped module.

    Attributes:
        name: Its name.
        strategy: The strategy that chose.
        graphs: Its graphs.
        notes: What the tuning changed or found, such as a switch to eval mode.
    """

    name: str
    strategy: str
    graphs: tuple[GraphReport, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def tuned(self) -> bool:
        """Whether calls of this module run on engines."""
        return bool(self.graphs) and any(graph.winner is not None for graph in self.graphs)


@attrs.frozen(kw_only=True)
class TuneReport:
    """What `tune` did.

    Attributes:
        modules: The modules that the calls reached.
        device: Where they were tuned.
        environment: Versions and hardware.
        seconds: Time the whole tuning took.
        dry_run: Whether only recording was asked for.
    """

    modules: tuple[ModuleReport, ...]
    device: str
    environment: EnvironmentReport
    seconds: float
    dry_run: bool = False

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the report as JSON text."""
        return json.dumps(attrs.asdict(self), indent=indent)

    def summary(self) -> str:
        """Return the report as text for a terminal."""
        lines = [f"tuned on {self.device} in {self.seconds:.1f} s"]
        for module in self.modules:
            lines.append(f"{module.name} ({module.strategy})")
            lines.extend(f"  note: {note}" for note in module.notes)
            for graph in module.graphs:
                lines.extend(_graph_lines(graph))
        return "\n".join(lines)

    def __str__(self) -> str:
        """Return `summary`."""
        return self.summary()


def _graph_lines(graph: GraphReport) -> list[str]:
    dims = f", dims {', '.join(graph.dims)}" if graph.dims else ""
    calls = "1 call" if graph.samples == 1 else f"{graph.samples} calls"
    lines = [f"  {graph.name}: {calls}{dims}"]
    lines.extend(f"    {tensor}" for tensor in graph.inputs)
    lines.extend(f"    fixed: {constant}" for constant in graph.constants)
    lines.extend(f"    only sizes with {condition}" for condition in graph.conditions)
    for candidate in graph.candidates:
        lines.extend(_candidate_lines(candidate, graph.eager))
    if graph.reason:
        lines.append(f"    -> {graph.winner or 'eager'}: {_first_line(graph.reason)}")
    return lines


def _first_line(text: str) -> str:
    """Return the first line of a text, shortened; the whole is in the report's JSON."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _LINE_LENGTH else f"{line[:_LINE_LENGTH]}..."


def _candidate_lines(candidate: CandidateReport, eager: Measurement | None) -> list[str]:
    tried = [
        f"      {'ok' if attempt.succeeded else 'no'}: {attempt.step}"
        + (f": {_first_line(attempt.detail)}" if attempt.detail else "")
        for attempt in candidate.attempts
    ]
    if candidate.error is not None:
        failed = f"    {candidate.backend}: failed after {candidate.seconds.build:.1f} s"
        # Where attempts are listed, the error only gathers them.
        return [failed, *(tried or [f"      {_first_line(candidate.error)}"])]
    if candidate.status == "not tried":
        return [f"    {candidate.backend}: not tried: {candidate.reason}"]
    facts = [f"built in {candidate.seconds.build:.1f} s"]
    if candidate.check is not None:
        facts.append(
            f"{candidate.check.cases} checks, at most "
            f"{math.ceil(100 * candidate.check.tolerance_share)} % of what may differ"
        )
    if candidate.measurement is not None and eager is not None:
        facts.append(f"p50 {candidate.measurement.p50_ms:.3f} ms, eager {eager.p50_ms:.3f} ms")
    return [f"    {candidate.backend}: {', '.join(facts)}", *tried]

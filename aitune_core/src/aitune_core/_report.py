"""What a tuning did, as a record."""

from __future__ import annotations

import json
import math
import traceback
from typing import Any, Final

import attrs

from aitune_core._environment import EnvironmentReport
from aitune_core.backend import Attempt
from aitune_core.strategy import CheckResult, Measurement, Outcome

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
        error: Why it failed, with the chain of causes; None where it did not.
        check: Result of the numeric check.
        measurement: Latencies of its engine.
        eager: Latencies of eager in the same rounds.
        build_seconds: Time spent on building.
        attempts: Ways of building that it tried.
    """

    backend: str
    options: dict[str, Any]
    error: str | None
    check: CheckResult | None
    measurement: Measurement | None
    eager: Measurement | None
    build_seconds: float
    attempts: tuple[Attempt, ...]

    @classmethod
    def of(cls, outcome: Outcome) -> CandidateReport:
        """Record an outcome without its engine."""
        return cls(
            backend=outcome.backend.name,
            options=outcome.backend.config.to_options(),
            error=None if outcome.error is None else _error_chain(outcome.error),
            check=outcome.check,
            measurement=outcome.measurement,
            eager=outcome.eager,
            build_seconds=outcome.build_seconds,
            attempts=outcome.attempts,
        )


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
        inputs: Its tensors, with dtype, shape and dims in words.
        dims: Its dims with their ranges, in words.
        constants: Arguments that are no tensors and not at their defaults, such as ``"k = 3"``.
        conditions: What sizes must meet besides, for the winner to take the call.
        samples: Number of recorded calls.
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
        lines.extend(_candidate_lines(candidate))
    if graph.reason:
        lines.append(f"    -> {graph.winner or 'eager'}: {_first_line(graph.reason)}")
    return lines


def _first_line(text: str) -> str:
    """Return the first line of a text, shortened; the whole is in the report's JSON."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _LINE_LENGTH else f"{line[:_LINE_LENGTH]}..."


def _candidate_lines(candidate: CandidateReport) -> list[str]:
    tried = [
        f"      {'ok' if attempt.succeeded else 'no'}: {attempt.step}"
        + (f": {_first_line(attempt.detail)}" if attempt.detail else "")
        for attempt in candidate.attempts
    ]
    if candidate.error is not None:
        failed = f"    {candidate.backend}: failed after {candidate.build_seconds:.1f} s"
        # Where attempts are listed, the error only gathers them.
        return [failed, *(tried or [f"      {_first_line(candidate.error)}"])]
    facts = [f"built in {candidate.build_seconds:.1f} s"]
    if candidate.check is not None:
        facts.append(
            f"{candidate.check.cases} checks, at most "
            f"{math.ceil(100 * candidate.check.tolerance_share)} % of what may differ"
        )
    if candidate.measurement is not None and candidate.eager is not None:
        facts.append(
            f"p50 {candidate.measurement.p50_ms:.3f} ms, eager {candidate.eager.p50_ms:.3f} ms"
        )
    return [f"    {candidate.backend}: {', '.join(facts)}", *tried]

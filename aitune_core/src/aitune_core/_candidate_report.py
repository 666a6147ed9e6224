"""What a report keeps of an outcome."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from typing import Any, Final

from aitune_core._report import CandidateReport
from aitune_core.results import Decision, Outcome

__all__ = ["candidate_report"]

_MAX_CAUSES: Final = 5
#: How much of an error says why a candidate failed, in characters.
_REASON_LENGTH: Final = 300


def candidate_report(outcome: Outcome, decision: Decision) -> CandidateReport:
    """Record an outcome without its engine."""
    status, reason = _status(outcome, decision)
    return CandidateReport(
        backend=outcome.backend.name,
        options=_plain(outcome.backend.config.to_options()),
        status=status,
        reason=reason,
        error=None if outcome.error is None else _error_chain(outcome.error),
        error_facts={} if outcome.error is None else _facts(outcome.error),
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
        return "failed", _sentence(outcome.error)
    if decision.winner is not None and outcome.engine is decision.winner.engine:
        return "won", decision.reason
    return "lost", decision.lost.get(outcome.backend, decision.reason)


def _sentence(error: Exception) -> str:
    """Return the first line of an error; with the next one where it only announces that."""
    line, _, others = str(error).strip().partition("\n")
    if line.endswith(":"):
        line = f"{line} {others.strip().partition(chr(10))[0]}".strip()
    line = line or type(error).__name__
    return line if len(line) <= _REASON_LENGTH else f"{line[:_REASON_LENGTH]}..."


def _error_chain(error: BaseException) -> str:
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(parts) < _MAX_CAUSES:
        parts.append("".join(traceback.format_exception_only(current)).strip())
        current = current.__cause__
    return "\n  caused by: ".join(parts)


def _facts(error: Exception) -> dict[str, Any]:
    facts = {"type": type(error).__name__, **vars(error)}
    return {
        name: _plain(value)
        for name, value in facts.items()
        if value is not None and not name.startswith("_")
    }


def _plain(value: Any) -> Any:  # noqa: ANN401
    """Return a value as JSON has it; what JSON has not, as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # Exact types: subclasses may print as anything.
    return value if value is None or type(value) in {bool, int, float, str} else str(value)

"""Whether a candidate keeps to a strategy's limits."""

from __future__ import annotations

from aitune_core.errors import CandidateRejectedError
from aitune_core.limits import Limits
from aitune_core.results import Outcome

__all__ = ["broken_limit", "grown"]


def grown(before: int | None, after: int | None) -> int | None:
    """Return by how much memory has grown, in bytes; None where it cannot be told."""
    return None if before is None or after is None else max(0, after - before)


def broken_limit(outcome: Outcome, limits: Limits) -> CandidateRejectedError | None:
    """Return the error for the first limit that a correct candidate breaks, if any."""
    taken = {
        "max_build_seconds": outcome.seconds.build,
        "max_error": None if outcome.check is None else outcome.check.error,
        "max_memory_bytes": outcome.memory_bytes,
    }
    for rule, got in taken.items():
        limit = getattr(limits, rule)
        if limit is not None and got is not None and got > limit:
            name = outcome.backend.name
            msg = f"{name} is correct but takes {got:.4g} where {rule} = {limit:.4g} is allowed"
            return CandidateRejectedError(msg, backend_name=name, rule=rule, limit=limit, got=got)
    return None

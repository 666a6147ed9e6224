"""The strategy for the lowest latency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from aitune_core._choice import build_all, decision, fastest, speed
from aitune_core.results import Decision
from aitune_core.strategy import BackendSource, Strategy, Trial, checked_flag

__all__ = ["MinLatencyStrategy"]


class MinLatencyStrategy(Strategy):
    """Use the backend with the lowest latency on the recorded calls.

    Every candidate is built and checked. Those that are correct are timed on recorded calls, from
    small to large ones, beside eager and each other, in interleaved rounds; one that has no hope
    is taken out early. A candidate wins when it is faster than eager and than each candidate
    before it in order, by the whole confidence interval of their ratio: where there is no
    difference for sure, the one that comes first stays, and eager comes before all. Where none is
    faster than eager, nothing wins: `tune` raises, or keeps eager, as ``on_failure`` says.

    Args:
        backends: Candidates, the simplest first; None means every available backend: those of
            plugins by name, then ``inductor``.
        allow_slower: Let the fastest correct candidate win, even where eager is faster.
        **limits: The fields of `Limits`.

    Raises:
        ConfigError: The sequence is empty, or an entry or a limit cannot be used.
    """

    name: ClassVar[str] = "min_latency"

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
        """Build all, time all, take the fastest."""
        outcomes = trial.measure(build_all(trial))
        winner, lost = fastest(trial, outcomes, allow_slower=self.allow_slower)
        if winner is None:
            return decision(trial, None, lost, "no candidate is faster than eager for sure")
        return decision(trial, winner, lost, f"lowest latency; {speed(winner.ratio)}")

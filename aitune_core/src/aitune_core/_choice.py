"""What strategies have in common: who wins, and why the others do not."""

from __future__ import annotations

from collections.abc import Sequence

from aitune_core.backend import Backend
from aitune_core.results import Decision, Outcome, Ratio
from aitune_core.strategy import Trial

__all__ = ["build_all", "decision", "fastest", "speed"]


def speed(ratio: Ratio | None) -> str:
    """Return in words how fast something is beside eager."""
    if ratio is None:
        return "speed not measured"
    value, low, high = ratio.value, ratio.low, ratio.high
    percent = f"{100 * ratio.confidence:g} % interval"
    if value < 1:
        value, low, high = 1 / value, 1 / high, 1 / low
        return f"takes {value:.2f} times as long as eager ({percent} {low:.2f} to {high:.2f})"
    return f"{value:.2f} times as fast as eager ({percent} {low:.2f} to {high:.2f})"


def build_all(trial: Trial) -> list[Outcome]:
    """Build and check every candidate; return those that are correct, in order."""
    outcomes = [trial.build(backend) for backend in trial.backends]
    return [outcome for outcome in outcomes if outcome.succeeded]


def fastest(
    trial: Trial, outcomes: Sequence[Outcome], *, allow_slower: bool
) -> tuple[Outcome | None, dict[Backend, str]]:
    """Return the fastest of some measured candidates, and why the others lost.

    One in front of which another one stands in order, eager in front of all, must be faster by
    the whole interval of their ratio: where there is no difference, the simpler one stays.

    Args:
        trial: Where they were measured.
        outcomes: Correct candidates in order.
        allow_slower: Whether one wins where all are slower than eager.
    """
    best: Outcome | None = None
    lost: dict[Backend, str] = {}
    for outcome in outcomes:
        if outcome.measurement is None:
            continue
        if best is None and allow_slower:
            best = outcome
            continue
        ratio = trial.compare(outcome, best)
        if ratio.faster:
            if best is not None:
                lost[best.backend] = _behind(trial.compare(best, outcome), outcome)
            best = outcome
        else:
            lost[outcome.backend] = _behind(ratio, best)
    return best, lost


def _behind(ratio: Ratio, winner: Outcome | None) -> str:
    """Say why something that is so many times as fast as the winner is not taken."""
    name = "eager" if winner is None else winner.backend.name
    percent = f"{100 * ratio.confidence:g} % interval"
    if ratio.slower:
        factor, low, high = 1 / ratio.value, 1 / ratio.high, 1 / ratio.low
        return f"takes {factor:.2f} times as long as {name} ({percent} {low:.2f} to {high:.2f})"
    return (
        f"no sure difference from {name}, which comes first: {ratio.value:.2f} times as fast "
        f"({percent} {ratio.low:.2f} to {ratio.high:.2f})"
    )


def decision(
    trial: Trial, winner: Outcome | None, lost: dict[Backend, str], reason: str
) -> Decision:
    """Return a decision; where none wins, the reason lists why."""
    if winner is None:
        why = [
            f"{backend.name}: {lost[backend]}" if backend in lost else f"{backend.name} failed"
            for backend in trial.backends
        ]
        reason = f"{reason}; {'; '.join(why)}"
    return Decision(winner, reason, lost=lost)

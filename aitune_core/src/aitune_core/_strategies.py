"""The strategies that the core brings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from aitune_core.errors import ConfigError
from aitune_core.results import Decision, Outcome
from aitune_core.strategy import BackendSource, Strategy, Trial

__all__ = ["FirstWinsStrategy", "OneBackendStrategy"]


class OneBackendStrategy(Strategy):
    """Use one backend, or fail.

    The backend is built, checked against eager and measured. It serves the graph when its
    outputs are right, even where it is slower than eager; the report gives the ratio.

    Args:
        backend: A backend, a registered name, or ``(name, options)``.

    Raises:
        ConfigError: It is none of these.
    """

    name: ClassVar[str] = "one_backend"

    def __init__(self, backend: BackendSource) -> None:
        super().__init__((backend,))

    def decide(self, trial: Trial) -> Decision:
        """Evaluate the one backend."""
        outcome = trial.evaluate(trial.backends[0])
        if not outcome.succeeded:
            return Decision(None, f"{outcome.backend.name} failed: {outcome.error}")
        return Decision(outcome, f"the only candidate is correct; {_ratio(outcome)}")


class FirstWinsStrategy(Strategy):
    """Use the first backend that is right and not slower than eager.

    Candidates are built, checked and measured in order until one passes the numeric check with a
    median latency no higher than eager's; later ones are not built.

    Args:
        backends: Candidates in order; None means every available backend:
            those of plugins by name, then ``"inductor"``.
        allow_slower: Take the first correct candidate, whatever its speed.

    Raises:
        ConfigError: The sequence is empty, or an entry is neither a backend nor a name.
    """

    name: ClassVar[str] = "first_wins"

    def __init__(
        self, backends: Sequence[BackendSource] | None = None, *, allow_slower: bool = False
    ) -> None:
        super().__init__(backends)
        if not isinstance(allow_slower, bool):
            msg = f"allow_slower must be True or False, got {allow_slower!r}"
            raise ConfigError(msg, field="allow_slower", value=allow_slower, allowed=(True, False))
        self.allow_slower = allow_slower

    def decide(self, trial: Trial) -> Decision:
        """Evaluate candidates until one wins."""
        lost = []
        for backend in trial.backends:
            outcome = trial.evaluate(backend)
            if not outcome.succeeded:
                lost.append(f"{backend.name} failed: {outcome.error}")
            elif self.allow_slower or (outcome.speedup or 0.0) >= 1.0:
                return Decision(outcome, f"first correct candidate; {_ratio(outcome)}")
            else:
                lost.append(f"{backend.name} is slower than eager ({_ratio(outcome)})")
        return Decision(None, "no candidate won: " + "; ".join(lost))


def _ratio(outcome: Outcome) -> str:
    speedup = outcome.speedup
    if not speedup:
        return "speed not measured"
    if speedup < 1:
        return f"takes {1 / speedup:.2f} times as long as eager"
    return f"{speedup:.2f} times as fast as eager"

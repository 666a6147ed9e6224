"""The strategies that try candidates one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from aitune_core._choice import speed
from aitune_core.backend import Backend
from aitune_core.results import Decision
from aitune_core.strategy import BackendSource, Strategy, Trial, checked_flag

__all__ = ["FirstWinsStrategy", "OneBackendStrategy"]


class OneBackendStrategy(Strategy):
    """Use one backend, or fail.

    The backend is built, checked against eager and measured. It serves the graph when its
    outputs are right, even where it is slower than eager; the report gives the ratio. Where it
    fails or breaks a limit, nothing wins: `tune` raises, or keeps eager, as ``on_failure`` says.

    Args:
        backend: A `BackendSource`: a backend, a registered name, or ``(name, options)``.
        **limits: The fields of `Limits`.

    Raises:
        ConfigError: It is none of these, or a limit cannot be used.
    """

    name: ClassVar[str] = "one_backend"

    def __init__(self, backend: BackendSource, **limits: Any) -> None:  # noqa: ANN401
        super().__init__((backend,), **limits)

    def decide(self, trial: Trial) -> Decision:
        """Evaluate the one backend."""
        outcome = trial.evaluate(trial.backends[0])
        if not outcome.succeeded:
            why = outcome.not_tried or outcome.error
            return Decision(None, f"{outcome.backend.name} failed: {why}")
        return Decision(outcome, f"the only candidate is correct; {speed(outcome.ratio)}")


class FirstWinsStrategy(Strategy):
    """Use the first backend that is right and faster than eager.

    Candidates are built, checked and measured beside eager in order, until one passes the numeric
    check and is faster than eager by the whole confidence interval of their ratio; later ones are
    not built. Where none is, nothing wins: `tune` raises, or keeps eager, as ``on_failure`` says.

    Args:
        backends: Candidates in order; None means every available backend: those of plugins by
            name, then ``inductor``.
        allow_slower: Take the first correct candidate, whatever its speed.
        **limits: The fields of `Limits`.

    Raises:
        ConfigError: The sequence is empty, or an entry or a limit cannot be used.
    """

    name: ClassVar[str] = "first_wins"

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
        """Evaluate candidates until one wins."""
        lost: dict[Backend, str] = {}
        why: list[str] = []
        for place, backend in enumerate(trial.backends):
            outcome = trial.evaluate(backend)
            if not outcome.succeeded:
                why.append(f"{backend.name} failed: {outcome.not_tried or outcome.error}")
                continue
            if self.allow_slower or (outcome.ratio is not None and outcome.ratio.faster):
                for later in trial.backends[place + 1 :]:
                    trial.skip(later, f"{backend.name} won before it")
                reason = f"first correct candidate; {speed(outcome.ratio)}"
                return Decision(outcome, reason, lost=lost)
            lost[backend] = f"not faster than eager for sure: {speed(outcome.ratio)}"
            why.append(f"{backend.name} is {lost[backend]}")
        return Decision(None, "no candidate won: " + "; ".join(why), lost=lost)

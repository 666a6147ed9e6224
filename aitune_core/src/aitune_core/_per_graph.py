"""Another strategy for each graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from aitune_core.errors import ConfigError
from aitune_core.results import Decision
from aitune_core.specs import GraphSpec
from aitune_core.strategy import Strategy, Trial

__all__ = ["PerGraphStrategy"]


class PerGraphStrategy(Strategy):
    """Choose a strategy by looking at the graph.

    What is built and what wins is up to the chosen strategy, its candidates and limits included.

    Args:
        choose: Takes the `GraphSpec` and returns a `Strategy` or the name of one, such as
            ``lambda graph: "min_latency" if len(graph.inputs) == 1 else "max_throughput"``.

    Raises:
        ConfigError: ``choose`` is not callable, or returns something else.
    """

    name: ClassVar[str] = "per_graph"

    def __init__(self, choose: Callable[[GraphSpec], Strategy | str]) -> None:
        super().__init__()
        if isinstance(choose, type) or not callable(choose):
            msg = f"choose must be a function from a GraphSpec to a strategy, got {choose!r}"
            raise ConfigError(msg, field="choose", value=choose, allowed="a function")
        self.backends = ()  # those of the chosen strategies count
        self._choose = choose

    def for_graph(self, graph: GraphSpec) -> Strategy | str:
        """Return what ``choose`` gives for a graph."""
        return self._choose(graph)

    def decide(self, trial: Trial) -> Decision:
        """Decide as the strategy for the trial's graph, where that is no name."""
        chosen = self.for_graph(trial.graph)
        if not isinstance(chosen, Strategy):
            msg = f"choose gave {chosen!r} for {trial.graph.name!r}, which only tune can look up"
            raise ConfigError(msg, field="choose", value=chosen, allowed="a Strategy")
        return chosen.decide(trial)

"""The interface between the core and its strategies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from aitune_core.backend import Backend
from aitune_core.errors import ConfigError
from aitune_core.results import Decision, Outcome
from aitune_core.specs import GraphSpec

__all__ = [
    "BackendSource",
    "Strategy",
    "Trial",
]

#: A backend object, a registered name, or a name with options.
BackendSource: TypeAlias = Backend | str | tuple[str, Mapping[str, Any]]


class Trial(ABC):
    """What a strategy works with: one graph, its candidates, and the means to try them."""

    graph: GraphSpec
    #: The candidates, in the strategy's order.
    backends: tuple[Backend, ...]

    @abstractmethod
    def evaluate(self, backend: Backend) -> Outcome:
        """Build, check and measure a candidate. Failures are returned, not raised."""


class Strategy(ABC):
    """Decides which candidate serves a graph.

    Args:
        backends: The candidates in order; None means every available backend:
            those of plugins by name, then ``"inductor"``.

    Raises:
        ConfigError: The sequence is empty, or an entry is neither a backend nor a name.
    """

    #: Lower case, stable.
    name: ClassVar[str]

    def __init__(self, backends: Sequence[BackendSource] | None = None) -> None:
        self.backends = None if backends is None else _checked_sources(backends)

    @abstractmethod
    def decide(self, trial: Trial) -> Decision:
        """Try candidates of ``trial`` and choose one."""

    def __repr__(self) -> str:
        """Return class and candidates."""
        return f"{type(self).__name__}({self.backends!r})"


def _checked_sources(backends: Any) -> tuple[BackendSource, ...]:  # noqa: ANN401
    if isinstance(backends, str | Backend) or not isinstance(backends, Iterable):
        msg = (
            f"backends must be a sequence of backends or names, got {backends!r}; put it in a list"
        )
        raise ConfigError(msg, field="backends", value=backends, allowed="a sequence")
    sources = tuple(backends)
    if not sources:
        msg = "backends is empty; name at least one, or pass None for all that are available"
        raise ConfigError(msg, field="backends", value=backends, allowed="at least one")
    for source in sources:
        named = isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], str)  # noqa: PLR2004
        if not (isinstance(source, Backend | str) or named):
            kind = "a class, not an instance" if isinstance(source, type) else repr(source)
            msg = f"a candidate must be a Backend, a name or (name, options), got {kind}"
            raise ConfigError(
                msg, field="backends", value=source, allowed="Backend, str or (str, options)"
            )
    return sources

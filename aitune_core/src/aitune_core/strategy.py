"""The interface between the core and its strategies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from aitune_core.backend import Backend
from aitune_core.errors import ConfigError
from aitune_core.limits import Limits
from aitune_core.results import Decision, Measurement, Outcome, Ratio
from aitune_core.specs import GraphSpec

__all__ = [
    "BackendSource",
    "Limits",
    "Strategy",
    "Trial",
    "checked_flag",
]

#: A backend object, a registered name, a name with options, or an entry of a configuration file:
#: ``{"backend": name, "options": {...}}``.
BackendSource: TypeAlias = Backend | str | tuple[str, Mapping[str, Any]] | Mapping[str, Any]


class Trial(ABC):
    """What a strategy works with: one graph, its candidates, and the means to try them.

    Failures are returned, not raised. The limits of the strategy are kept: a candidate that breaks
    one has failed, and when the time is over the rest is returned as not tried.
    """

    graph: GraphSpec
    #: The candidates, in the strategy's order.
    backends: tuple[Backend, ...]

    @abstractmethod
    def build(self, backend: Backend) -> Outcome:
        """Build and check a candidate, without measuring it."""

    @abstractmethod
    def measure(
        self,
        outcomes: Sequence[Outcome],
        batch_sizes: Sequence[int | None] | None = None,
        *,
        burst: bool = False,
    ) -> tuple[Outcome, ...]:
        """Time correct candidates and eager in interleaved rounds until the fastest is clear.

        Args:
            outcomes: Correct candidates.
            batch_sizes: A batch size for eager and for each of them; None means the recorded
                calls. Where they are given, times per row are compared.
            burst: Whether to compare calls that do not wait for one another, on CUDA.

        Returns:
            The outcomes with their measurements, in order.
        """

    @abstractmethod
    def sweep(self, outcomes: Sequence[Outcome], *, burst: bool = False) -> tuple[Outcome, ...]:
        """Time correct candidates and eager at batch sizes that grow.

        From the smallest to the largest in the range of the batch dim, each until its throughput
        stops growing or memory ends.

        Returns:
            The outcomes with `Measurement.batches`, in order; as they were where the graph has no
            batch dim.
        """

    @abstractmethod
    def compare(self, first: Outcome, second: Outcome | None = None) -> Ratio:
        """Return how many times as fast one is as another, in the rounds that ran last.

        Args:
            first: A measured outcome.
            second: Another one; None means eager.
        """

    @abstractmethod
    def skip(self, backend: Backend, reason: str) -> Outcome:
        """Note that a candidate is not tried, and why."""

    @property
    @abstractmethod
    def eager(self) -> Measurement | None:
        """What was measured of eager last."""

    def evaluate(self, backend: Backend) -> Outcome:
        """Build, check and measure a candidate beside eager."""
        outcome = self.build(backend)
        return self.measure([outcome])[0] if outcome.succeeded else outcome


class Strategy(ABC):
    """Decides which candidate serves a graph.

    Args:
        backends: The candidates in order; None means every available backend: those of plugins by
            name, then ``inductor``.
        **limits: The fields of `Limits`.

    Raises:
        ConfigError: The sequence is empty, an entry is none of `BackendSource`, or a limit is
            unknown or no finite number above 0.
    """

    #: Lower case, stable.
    name: ClassVar[str]

    def __init__(self, backends: Sequence[BackendSource] | None = None, **limits: Any) -> None:  # noqa: ANN401
        self.backends = None if backends is None else _checked_sources(backends)
        self.limits = Limits.of(**limits)

    @abstractmethod
    def decide(self, trial: Trial) -> Decision:
        """Try candidates of ``trial`` and choose one."""

    def for_graph(self, graph: GraphSpec) -> Strategy | str:  # noqa: ARG002
        """Return the strategy for a graph: this one, unless a subclass has others."""
        return self

    def __repr__(self) -> str:
        """Return class and candidates."""
        return f"{type(self).__name__}({self.backends!r})"


def checked_flag(name: str, value: Any) -> bool:  # noqa: ANN401 - what the user gave
    """Return a flag.

    Raises:
        ConfigError: It is neither True nor False.
    """
    if not isinstance(value, bool):
        msg = f"{name} must be True or False, got {value!r}"
        raise ConfigError(msg, field=name, value=value, allowed=(True, False))
    return value


def _checked_sources(backends: Any) -> tuple[BackendSource, ...]:  # noqa: ANN401
    if isinstance(backends, str | Backend | Mapping) or not isinstance(backends, Iterable):
        msg = (
            f"backends must be a sequence of backends or names, got {backends!r}; put it in a list"
        )
        raise ConfigError(msg, field="backends", value=backends, allowed="a sequence")
    sources = tuple(_checked_source(source) for source in backends)
    if not sources:
        msg = "backends is empty; name at least one, or pass None for all that are available"
        raise ConfigError(msg, field="backends", value=backends, allowed="at least one")
    return sources


def _checked_source(source: Any) -> BackendSource:  # noqa: ANN401
    if isinstance(source, Backend | str):
        return source
    if isinstance(source, Mapping) and "backend" in source:
        extra = sorted(map(str, set(source) - {"backend", "options"}))
        if extra:
            msg = (
                f"an entry of backends has 'backend' and 'options', got also {', '.join(extra)}; "
                "put options under 'options'"
            )
            raise ConfigError(msg, field="backends", value=source, allowed=("backend", "options"))
        source = (source["backend"], source.get("options", {}))
    pair = isinstance(source, tuple) and len(source) == 2  # noqa: PLR2004
    if pair and isinstance(source[0], str) and isinstance(source[1], Mapping):
        return source[0], source[1]
    kind = "a class, not an instance" if isinstance(source, type) else repr(source)
    msg = (
        "a candidate must be a Backend, a name, (name, options) or "
        f"{{'backend': name, 'options': {{...}}}}, got {kind}"
    )
    raise ConfigError(msg, field="backends", value=source, allowed="Backend, str or (str, options)")

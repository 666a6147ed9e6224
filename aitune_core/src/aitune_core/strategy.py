"""The interface between the core and its strategies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import attrs

from aitune_core.backend import Attempt, Backend, Engine
from aitune_core.errors import ConfigError
from aitune_core.specs import GraphSpec

__all__ = [
    "BackendSource",
    "CheckResult",
    "Decision",
    "Measurement",
    "Outcome",
    "Strategy",
    "Trial",
]

#: A backend object, a registered name, or a name with options.
BackendSource: TypeAlias = Backend | str | tuple[str, Mapping[str, Any]]


@attrs.frozen(kw_only=True)
class CheckResult:
    """The numeric check of an engine that passed it.

    Attributes:
        cases: Number of inputs on which it was compared with eager.
        worst_difference: Largest absolute difference of any output element.
        worst_output: Path of the output with the largest share of its tolerance.
        tolerance_share: Largest difference as a share of what was allowed, 0 to 1.
        skipped: Synthetic inputs that eager itself refused, in words.
    """

    cases: int
    worst_difference: float
    worst_output: str
    tolerance_share: float
    skipped: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Measurement:
    """Latencies of one executable on the recorded calls, in milliseconds.

    Attributes:
        p50_ms: Median.
        p90_ms: 90th percentile.
        p99_ms: 99th percentile.
        calls: Number of timed calls.
    """

    p50_ms: float
    p90_ms: float
    p99_ms: float
    calls: int


@attrs.frozen(kw_only=True)
class Outcome:
    """What became of a candidate.

    Attributes:
        backend: The candidate.
        engine: The checked engine; None where the candidate failed.
        error: Why it failed; None where it did not.
        check: Result of the numeric check; None where it failed.
        measurement: Its latencies; None where it failed.
        eager: Latencies of the eager module, measured in the same interleaved rounds.
        build_seconds: Time spent on building, whether it succeeded or not.
        attempts: The ways of building that the backend tried.
    """

    backend: Backend
    engine: Engine | None = None
    error: Exception | None = None
    check: CheckResult | None = None
    measurement: Measurement | None = None
    eager: Measurement | None = None
    build_seconds: float = 0.0
    attempts: tuple[Attempt, ...] = ()

    @property
    def succeeded(self) -> bool:
        """Whether the candidate has a correct engine."""
        return self.engine is not None

    @property
    def speedup(self) -> float | None:
        """Median latency of eager divided by that of the engine; None where not measured."""
        if self.measurement is None or self.eager is None:
            return None
        return self.eager.p50_ms / self.measurement.p50_ms


@attrs.frozen
class Decision:
    """A strategy's choice for one graph.

    Attributes:
        winner: The outcome whose engine serves the graph; None keeps eager.
        reason: One sentence that says why.
    """

    winner: Outcome | None
    reason: str


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
        backends: The candidates in order; None means every available backend, by name.

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

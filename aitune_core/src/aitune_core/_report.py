"""The parts of a tuning's report, as records."""

from __future__ import annotations

from typing import Any

import attrs

from aitune_core._environment import EnvironmentReport
from aitune_core.backend import Attempt, EngineTable
from aitune_core.results import CheckResult, Measurement, Ratio, StepSeconds

__all__ = [
    "CandidateReport",
    "GraphReport",
    "ModuleReport",
    "TuneRecord",
]


@attrs.frozen(kw_only=True)
class CandidateReport:
    """What became of one candidate for one graph.

    Attributes:
        backend: Name of the backend.
        options: Its configuration.
        status: ``"won"``, ``"lost"``, ``"failed"`` or ``"not tried"``.
        reason: One sentence that says why it has that status.
        error: Why it failed, with the chain of causes; None where it did not.
        error_facts: What the error knows besides, such as the output and the place that differ.
        check: Result of the numeric check.
        measurement: Latencies of its engine.
        ratio: How many times as fast as eager it is.
        seconds: Time that it took, by step.
        memory_bytes: Memory that it took; None where it cannot be told.
        reused: Whether the engine was restored from an earlier tuning.
        attempts: Ways of building that it tried.
        tables: What the engine says of itself.
    """

    backend: str
    options: dict[str, Any]
    status: str
    reason: str
    error: str | None = None
    error_facts: dict[str, Any] = attrs.field(factory=dict)
    check: CheckResult | None = None
    measurement: Measurement | None = None
    ratio: Ratio | None = None
    seconds: StepSeconds = attrs.field(factory=StepSeconds)
    memory_bytes: int | None = None
    reused: bool = False
    attempts: tuple[Attempt, ...] = ()
    tables: tuple[EngineTable, ...] = ()


@attrs.frozen(kw_only=True)
class GraphReport:
    """One graph of a module.

    Attributes:
        name: Name of the graph.
        strategy: The strategy that decided it.
        inputs: Its tensors, with dtype, shape and dims in words.
        dims: Its dims with their ranges, in words.
        constants: Arguments that are no tensors and not at their defaults, such as ``"k = 3"``.
        conditions: What sizes must meet besides, for the winner to take the call.
        samples: Number of recorded calls.
        eager: Latencies of eager, in the rounds that decided; None where nothing was measured.
        candidates: What became of each candidate that was tried.
        winner: Name of the backend that serves it; None keeps eager.
        reason: Why, in one sentence.
    """

    name: str
    inputs: tuple[str, ...]
    dims: tuple[str, ...]
    samples: int
    constants: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    strategy: str = ""
    eager: Measurement | None = None
    candidates: tuple[CandidateReport, ...] = ()
    winner: str | None = None
    reason: str = ""


@attrs.frozen(kw_only=True)
class ModuleReport:
    """One wrapped module.

    Attributes:
        name: Its name.
        strategy: The strategy that chose.
        graphs: Its graphs.
        notes: What the tuning changed or found, such as a switch to eval mode.
    """

    name: str
    strategy: str
    graphs: tuple[GraphReport, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def tuned(self) -> bool:
        """Whether calls of this module run on engines."""
        return bool(self.graphs) and any(graph.winner is not None for graph in self.graphs)


@attrs.frozen(kw_only=True)
class TuneRecord:
    """The fields of a `TuneReport`.

    Attributes:
        modules: The modules that the calls reached.
        device: Where they were tuned.
        environment: Versions and hardware.
        seconds: Time the whole tuning took.
        dry_run: Whether only recording was asked for.
    """

    modules: tuple[ModuleReport, ...]
    device: str
    environment: EnvironmentReport
    seconds: float
    dry_run: bool = False

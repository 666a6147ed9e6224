"""What the core brings itself, as plugins bring theirs: references, and no imports."""

from __future__ import annotations

from typing import Final

from aitune_core.hookspecs import BackendReference, StrategyReference

__all__ = ["BACKENDS", "EAGER", "INDUCTOR", "STRATEGIES"]

EAGER: Final = "eager"
INDUCTOR: Final = "inductor"
BACKENDS: Final = (
    BackendReference(EAGER, "aitune_core._eager:EagerBackend", "The module as it is."),
    BackendReference(
        INDUCTOR, "aitune_core._inductor:InductorBackend", "PyTorch's compiler, as torch.compile."
    ),
)
STRATEGIES: Final = (
    StrategyReference(
        "latency_budget",
        "aitune_core._throughput:LatencyBudgetStrategy",
        "The backend with most samples per second within a latency.",
    ),
    StrategyReference(
        "max_throughput",
        "aitune_core._throughput:MaxThroughputStrategy",
        "The backend with most samples per second.",
    ),
    StrategyReference(
        "min_latency",
        "aitune_core._fastest:MinLatencyStrategy",
        "The backend with the lowest latency on recorded calls.",
    ),
    StrategyReference(
        "per_graph",
        "aitune_core._per_graph:PerGraphStrategy",
        "Another strategy for each graph.",
    ),
    StrategyReference(
        "first_wins",
        "aitune_core._strategies:FirstWinsStrategy",
        "The first backend that is right and faster than eager.",
    ),
    StrategyReference(
        "one_backend", "aitune_core._strategies:OneBackendStrategy", "One backend, or fail."
    ),
)

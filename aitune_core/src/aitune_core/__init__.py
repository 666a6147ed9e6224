"""aitune: the fastest correct executable for a PyTorch module, through named backends."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from aitune_core._fastest import MinLatencyStrategy
from aitune_core._module import Module
from aitune_core._per_graph import PerGraphStrategy
from aitune_core._plugins import BackendInfo, PluginRegistry, StrategyInfo, default_registry
from aitune_core._strategies import FirstWinsStrategy, OneBackendStrategy
from aitune_core._throughput import LatencyBudgetStrategy, MaxThroughputStrategy
from aitune_core.backend import (
    ArtifactReader,
    ArtifactWriter,
    Attempt,
    Backend,
    BuildRequest,
    Diagnosis,
    Engine,
    EngineTable,
)
from aitune_core.conditions import SizeCondition
from aitune_core.config import BackendConfig
from aitune_core.errors import (
    AituneError,
    AituneWarning,
    BackendError,
    BackendUnavailableError,
    BuildError,
    CallFormError,
    CandidateRejectedError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointIntegrityError,
    ConfigError,
    EngineClosedError,
    InputMismatchError,
    MissingExtraError,
    MissWarning,
    PluginConflictError,
    PluginError,
    PluginLoadError,
    PluginLoadWarning,
    RecordingError,
    ReportError,
    TuningError,
    UnknownBackendError,
    UnknownStrategyError,
    ValidationError,
)
from aitune_core.hookspecs import BackendReference, StrategyReference, hookimpl
from aitune_core.results import (
    BatchPoint,
    CheckResult,
    Decision,
    Measurement,
    Outcome,
    Ratio,
    StepSeconds,
)
from aitune_core.specs import BatchDim, DynamicDim, GraphSpec, TensorSpec
from aitune_core.strategy import Limits, Strategy, Trial

if TYPE_CHECKING:
    from aitune_core._checkpoint import load, save
    from aitune_core._tune_report import TuneReport
    from aitune_core._tuning import tune

__all__ = [
    "AituneError",
    "AituneWarning",
    "ArtifactReader",
    "ArtifactWriter",
    "Attempt",
    "Backend",
    "BackendConfig",
    "BackendError",
    "BackendInfo",
    "BackendReference",
    "BackendUnavailableError",
    "BatchDim",
    "BatchPoint",
    "BuildError",
    "BuildRequest",
    "CallFormError",
    "CandidateRejectedError",
    "CheckResult",
    "CheckpointError",
    "CheckpointFormatError",
    "CheckpointIntegrityError",
    "ConfigError",
    "Decision",
    "Diagnosis",
    "DynamicDim",
    "Engine",
    "EngineClosedError",
    "EngineTable",
    "FirstWinsStrategy",
    "GraphSpec",
    "InputMismatchError",
    "LatencyBudgetStrategy",
    "Limits",
    "MaxThroughputStrategy",
    "Measurement",
    "MinLatencyStrategy",
    "MissWarning",
    "MissingExtraError",
    "Module",
    "OneBackendStrategy",
    "Outcome",
    "PerGraphStrategy",
    "PluginConflictError",
    "PluginError",
    "PluginLoadError",
    "PluginLoadWarning",
    "PluginRegistry",
    "Ratio",
    "RecordingError",
    "ReportError",
    "SizeCondition",
    "StepSeconds",
    "Strategy",
    "StrategyInfo",
    "StrategyReference",
    "TensorSpec",
    "Trial",
    "TuneReport",
    "TuningError",
    "UnknownBackendError",
    "UnknownStrategyError",
    "ValidationError",
    "available_backends",
    "backend",
    "hookimpl",
    "load",
    "save",
    "strategy",
    "tune",
]

#: What serving does not need is imported when it is first used.
_LAZY: Final = {
    "TuneReport": "aitune_core._tune_report",
    "load": "aitune_core._checkpoint",
    "save": "aitune_core._checkpoint",
    "tune": "aitune_core._tuning",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _LAZY:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def available_backends() -> tuple[BackendInfo, ...]:
    """Return the registered backends, by name; imports no runtime.

    Returns:
        One entry per backend: name, distribution, version, whether its modules are installed,
        and the reason where they are not.
    """
    return default_registry().backend_infos()


def backend(name: str, **options: Any) -> Backend:  # noqa: ANN401
    """Return a backend by name.

    Args:
        name: A registered name, such as ``"onnxruntime"``.
        **options: Its configuration, such as ``execution_provider="cuda"``.

    Raises:
        UnknownBackendError: No plugin registered the name; the error lists those that are known.
        BackendUnavailableError: A module that it needs is not installed.
        ConfigError: An option is unknown or its value cannot be used.
    """
    return default_registry().backend(name, **options)


def strategy(name: str, **options: Any) -> Strategy:  # noqa: ANN401
    """Return a strategy by name.

    Args:
        name: A registered name: ``"first_wins"``, ``"latency_budget"``, ``"max_throughput"``,
            ``"min_latency"``, ``"one_backend"``, ``"per_graph"``, or one of a plugin.
        **options: Arguments of its class.

    Raises:
        UnknownStrategyError: No plugin registered the name; the error lists those that are known.
        ConfigError: It cannot be made with these options.
    """
    return default_registry().strategy(name, **options)

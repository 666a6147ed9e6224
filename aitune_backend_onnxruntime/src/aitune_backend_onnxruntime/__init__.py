"""ONNX Runtime backend of aitune.

Names are imported when they are first used: finding the plugin must not load a runtime.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aitune_backend_onnxruntime.backend import ONNXRuntimeBackend
    from aitune_backend_onnxruntime.config import (
        ONNXExecutionProvider,
        ONNXRuntimeBackendConfig,
    )
    from aitune_backend_onnxruntime.engine import ONNXRuntimeEngine
    from aitune_backend_onnxruntime.errors import (
        EngineRunError,
        OnnxExportError,
        ProviderPlacementError,
        ProviderUnavailableError,
        SessionTrialError,
        UnsupportedDtypeError,
    )

__all__ = [
    "EngineRunError",
    "ONNXExecutionProvider",
    "ONNXRuntimeBackend",
    "ONNXRuntimeBackendConfig",
    "ONNXRuntimeEngine",
    "OnnxExportError",
    "ProviderPlacementError",
    "ProviderUnavailableError",
    "SessionTrialError",
    "UnsupportedDtypeError",
]


def _home(name: str) -> str:
    if name in {"ONNXExecutionProvider", "ONNXRuntimeBackendConfig"}:
        return "config"
    if name == "ONNXRuntimeBackend":
        return "backend"
    return "engine" if name == "ONNXRuntimeEngine" else "errors"


def __getattr__(name: str) -> object:
    """Import a public name from where it lives (PEP 562)."""
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(importlib.import_module(f"{__name__}.{_home(name)}"), name)


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*globals(), *__all__})

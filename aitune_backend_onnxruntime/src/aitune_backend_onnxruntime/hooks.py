"""The hooks of this plugin. Imports nothing heavy, so that listing backends stays quick."""

from __future__ import annotations

from typing import Final

from aitune_core.hookspecs import BackendReference, hookimpl

__all__ = ["AITUNE_API_VERSION", "aitune_register_backends"]

#: Version of the core's interface that this plugin was written for.
AITUNE_API_VERSION: Final = 1


@hookimpl
def aitune_register_backends() -> tuple[BackendReference, ...]:
    """Name the ONNX Runtime backend."""
    return (
        BackendReference(
            "onnxruntime",
            "aitune_backend_onnxruntime.backend:ONNXRuntimeBackend",
            "ONNX export, run by ONNX Runtime on CPU, CUDA or TensorRT.",
            requires=("onnx", "onnxscript", "onnxruntime"),
        ),
    )

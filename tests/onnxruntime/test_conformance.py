"""The ONNX Runtime backend keeps the contract."""

from __future__ import annotations

from typing import ClassVar

import torch

from aitune_backend_onnxruntime.backend import ONNXRuntimeBackend
from aitune_core.testing import BackendConformance


class TestOnCpu(BackendConformance):
    backend_class = ONNXRuntimeBackend
    options: ClassVar = {"execution_provider": "cpu"}
    dtypes = (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
    )

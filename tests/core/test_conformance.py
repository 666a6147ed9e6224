"""The built-in backends keep the contract."""

from __future__ import annotations

import torch

from aitune_core._eager import EagerBackend
from aitune_core._inductor import InductorBackend
from aitune_core.testing import BackendConformance

EVERY = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
)


class TestEager(BackendConformance):
    backend_class = EagerBackend
    dtypes = EVERY
    can_store = False


class TestInductor(BackendConformance):
    backend_class = InductorBackend
    dtypes = EVERY
    can_store = False

"""Weight norm in a form that exports right for weights with one axis."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from aitune_backend_onnxruntime.patching import replaced_here

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["plain_weight_norm"]


@contextmanager
def plain_weight_norm() -> Iterator[None]:
    """Write weight norm of vectors out, with the same results; exporters take the wrong norm."""
    fused: Any = torch._weight_norm  # noqa: SLF001

    def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Any:  # noqa: ANN401
        if v.dim() != 1:
            return fused(v, g, dim)
        return v * (g / (v.abs() if dim == 0 else v.norm()))

    # Its name in torch.nn.utils is that of the function in it.
    hooks = importlib.import_module("torch.nn.utils.weight_norm")
    with (
        replaced_here(torch, "_weight_norm", weight_norm),
        replaced_here(hooks, "_weight_norm", weight_norm),
    ):
        yield

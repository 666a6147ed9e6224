"""Models rewritten with operators that are faster on CUDA, and compute the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from aitune_backend_onnxruntime.graph_edit import MICROSOFT, Editor
from aitune_backend_onnxruntime.rewrite_attention import attention_with_projections
from aitune_backend_onnxruntime.rewrite_convolution import (
    means_into_pooling,
    patches_into_product,
)
from aitune_backend_onnxruntime.rewrite_linear import (
    bias_into_gelu,
    rows_into_product,
    swaps_around_product,
    weights_in_order,
)
from aitune_backend_onnxruntime.rewrite_norm import sums_into_norm

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["rewrite_file"]

#: In this order, with what each changes.
_RULES: Final[tuple[tuple[str, Callable[[Editor], int]], ...]] = (
    ("rows as a product", rows_into_product),
    ("attention with its projections", attention_with_projections),
    ("swaps around a product", swaps_around_product),
    ("patches as a product", patches_into_product),
    ("bias in GELU", bias_into_gelu),
    ("sum and bias in layer normalisation", sums_into_norm),
    ("mean as pooling", means_into_pooling),
    ("weights in order", weights_in_order),
)


def rewrite_file(source: Path, target: Path) -> tuple[str, ...]:
    """Write a model that computes the same as another one, faster on CUDA.

    It takes its weights from the same file as the other one. New ones are made of those by nodes
    that ONNX Runtime computes when it creates a session.

    Args:
        source: An ONNX model; a file with its weights lies next to it.
        target: Where to write the other one, in the same folder.

    Returns:
        What was changed, with numbers; nothing is written where there is nothing to change.
    """
    model = ir.load(source)
    edit = Editor(model.graph)
    changes = []
    for name, rule in _RULES:
        count = rule(edit)
        if count:
            changes.append(f"{name} ({count})")
            RemoveUnusedNodesPass()(model)
    if changes:
        model.graph.opset_imports[MICROSOFT] = 1
        ir.save(model, target)
    return tuple(changes)

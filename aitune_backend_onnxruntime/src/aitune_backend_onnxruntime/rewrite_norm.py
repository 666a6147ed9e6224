"""Sums and their layer normalisation as one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aitune_backend_onnxruntime.graph_edit import (
    MICROSOFT,
    Editor,
    attribute,
    made_by,
    same_shape,
    sizes,
    sole,
)
from aitune_backend_onnxruntime.rewrite_linear import FAST_TYPES, biased

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["sums_into_norm"]

#: What the fused kernel takes: batch, sequence, width.
_RANK: Final = 3
_EPSILON: Final = 1e-5


def sums_into_norm(edit: Editor) -> int:
    """Make ``LayerNormalization(x + y)`` one kernel, which also adds the bias of a product.

    The sum is its fourth output where something else needs it.
    """
    count = 0
    for node in edit.nodes("LayerNormalization"):
        add = made_by(node.inputs[0], "Add")
        if add is None or not _fits(node, add):
            continue
        left, right = add.inputs
        parts, skip = biased(left), right
        if parts is None:
            parts, skip = biased(right), left
        x, bias = parts if parts is not None else (left, None)
        skip = skip if parts is not None else right
        alone = sole(add.outputs[0])
        outputs = edit.add(
            add,
            "SkipLayerNormalization",
            *(x, skip, *_gamma_and_beta(node), *([] if bias is None else [bias])),
            domain=MICROSOFT,
            outputs=1 if alone else 4,
            epsilon=attribute(node, "epsilon", _EPSILON),
        )
        edit.replace(node.outputs[0], outputs[0])
        if not alone:
            edit.replace(add.outputs[0], outputs[3])
            # The mean and the deviation are for training, and never written.
            outputs[1].name = outputs[2].name = ""
        count += 1
    return count


def _gamma_and_beta(node: ir.Node) -> list[ir.Value | None]:
    return [node.inputs[1], node.inputs[2] if len(node.inputs) > _RANK - 1 else None]


def _fits(node: ir.Node, add: ir.Node) -> bool:
    """Whether a normalisation is over the last axis, of a sum of two tensors of one shape."""
    left, right = add.inputs
    shape = sizes(node.inputs[0])
    if left is None or right is None or shape is None or len(shape) != _RANK:
        return False
    gamma, beta = _gamma_and_beta(node)
    return (
        attribute(node, "axis", -1) in {-1, _RANK - 1}
        and attribute(node, "stash_type", 1) == 1
        and node.inputs[0] is add.outputs[0]
        and add.outputs[0].dtype in FAST_TYPES
        and same_shape(left, right)
        and same_shape(left, add.outputs[0])
        and isinstance(shape[-1], int)
        and gamma is not None
        and all(part is None or _is_vector(part, shape[-1]) for part in (gamma, beta))
        and not any(output.uses() or output.is_graph_output() for output in node.outputs[1:])
    )


def _is_vector(value: ir.Value, size: int | str | None) -> bool:
    """Whether a value is there before any node runs, and has one axis of a size."""
    return value.is_initializer() and sizes(value) == [size]

"""Masks of attention as numbers that are added, which the fastest kernels take."""

from __future__ import annotations

from typing import Final

import attrs
import numpy as np
import onnx_ir as ir

from aitune_backend_onnxruntime.graph_edit import Editor, made_by, sizes

__all__ = ["Mask", "added_mask", "hides_nothing"]

_RANK: Final = 4
#: ONNX Runtime's Attention on CUDA gives zeros for rows whose highest number is not above this.
_HIDDEN: Final = -1e30
_LOWEST_HALF: Final = float(np.finfo(np.float16).min)


@attrs.frozen(eq=False)
class Mask:
    """A mask as it is added, and the rows that it leaves something to see.

    Attributes:
        bias: Batch or 1, 1, queries, keys.
        visible: Batch or 1, queries, 1; of type bool.
    """

    bias: ir.Value
    visible: ir.Value

    def without_hidden(self, edit: Editor, node: ir.Node, value: ir.Value) -> ir.Value:
        """Return attention's result with zeros in rows that see nothing."""
        dtype = node.outputs[0].dtype
        assert dtype is not None  # noqa: S101 - it is one of those that attention is fast with
        zero = edit.constant(np.zeros((), dtype.numpy()))
        return edit.add_one(node, "Where", self.visible, value, zero)


def hides_nothing(mask: ir.Value) -> bool:
    """Whether a mask is a constant that is true everywhere, or such a one repeated."""
    expand = made_by(mask, "Expand")
    if expand is not None and expand.inputs[0] is not None:
        return hides_nothing(expand.inputs[0])
    content = ir.convenience.get_const_tensor(mask)
    return content is not None and mask.dtype is ir.DataType.BOOL and bool(content.numpy().all())


def added_mask(
    edit: Editor, node: ir.Node, mask: ir.Value, known: dict[ir.Value, Mask]
) -> Mask | None:
    """Return a mask to add, made once per mask; None for one of a form that is not known.

    Args:
        edit: The graph.
        node: Attention that uses the mask.
        mask: Batch or 1, 1, queries, keys; or queries, keys. Bool, or numbers of attention's type.
        known: Masks made before, by the mask.
    """
    if mask in known:
        return known[mask]
    queries, keys = sizes(node.inputs[0]), sizes(node.inputs[1])
    shape, dtype = sizes(mask), node.outputs[0].dtype
    if queries is None or keys is None or shape is None or dtype is None:
        return None
    whole = [1] * (_RANK - len(shape)) + shape
    if (
        len(shape) not in {2, _RANK}
        or None in shape
        or whole[0] not in {1, queries[0]}
        or whole[1:] != [1, queries[2], keys[2]]
        or mask.dtype not in {ir.DataType.BOOL, dtype}
    ):
        return None
    if len(shape) < _RANK:
        mask_4d = edit.add_one(node, "Unsqueeze", mask, edit.integers(0, 1))
    else:
        mask_4d = mask
    known[mask] = _made(edit, node, mask_4d, dtype, boolean=mask.dtype is ir.DataType.BOOL)
    return known[mask]


def _made(
    edit: Editor, node: ir.Node, mask: ir.Value, dtype: ir.DataType, *, boolean: bool
) -> Mask:
    kind = dtype.numpy()
    lowest = _LOWEST_HALF if dtype is ir.DataType.FLOAT16 else _HIDDEN
    floor = edit.constant(np.array(lowest, kind))
    last = edit.integers(_RANK - 1)
    if boolean:
        bias = edit.add_one(node, "Where", mask, edit.constant(np.zeros((), kind)), floor)
        number = edit.add_one(node, "Cast", mask, to=ir.DataType.INT32.value)
        best = edit.add_one(node, "ReduceMax", number, last, keepdims=1)
        seen = edit.add_one(node, "Cast", best, to=ir.DataType.BOOL.value)
    else:
        # What is not finite spoils all sums of its row.
        bias = edit.add_one(node, "Max", mask, floor)
        best = edit.add_one(node, "ReduceMax", mask, last, keepdims=1)
        hidden = _HIDDEN if lowest == _HIDDEN else -np.inf
        seen = edit.add_one(node, "Greater", best, edit.constant(np.array(hidden, kind)))
    return Mask(bias, edit.add_one(node, "Squeeze", seen, edit.integers(1)))

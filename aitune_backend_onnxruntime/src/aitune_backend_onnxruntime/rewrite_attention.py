"""Attention of ONNX models with its projections, as ONNX Runtime's own operators take it.

Exported attention splits heads by Reshape and Transpose, which costs as much as the attention.
``Attention`` of ONNX Runtime takes the tensor before the projections, ``MultiHeadAttention`` the
ones after them, and both take the biases.

Source:
    ONNX Runtime, ContribOperators.md: ``com.microsoft.Attention`` and ``MultiHeadAttention``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
import onnx_ir as ir

from aitune_backend_onnxruntime.graph_edit import (
    MICROSOFT,
    Editor,
    attribute,
    made_by,
    numbers,
    sizes,
    sole,
)
from aitune_backend_onnxruntime.rewrite_linear import FAST_TYPES, biased
from aitune_backend_onnxruntime.rewrite_mask import Mask, added_mask

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["attention_with_projections"]

_HEADS_FIRST: Final = (0, 2, 1, 3)
_PARTS_FIRST: Final = (2, 0, 3, 1, 4)
_SPLIT_RANK: Final = 4
_PACKED_RANK: Final = 5
_PARTS: Final = 3
_MASK_INPUT: Final = 3
#: Attributes of Attention that change its result, with the value that does nothing.
_NEUTRAL: Final[dict[str, Any]] = {"softcap": 0.0, "qk_matmul_output_mode": 0}


@attrs.frozen(eq=False)
class _Heads:
    """Heads of attention.

    Attributes:
        source: What they were split from: batch, sequence, and the heads of one or three tensors.
        heads: Number of heads.
        part: Which of three tensors; None where the source is one.
    """

    source: ir.Value
    heads: int
    part: int | None


@attrs.frozen(eq=False)
class _Projection:
    """A tensor that a linear layer makes."""

    source: ir.Value
    product: ir.Value
    weight: ir.Value
    bias: ir.Value | None


def attention_with_projections(edit: Editor) -> int:
    """Make attention and what splits and joins its heads one operator."""
    count = 0
    masks: dict[ir.Value, Mask] = {}
    for node in edit.nodes("Attention"):
        result = _joined(node)
        heads = [_heads(value) for value in node.inputs[:_PARTS]]
        if result is None or not _plain(node) or None in heads:
            continue
        known = [one for one in heads if one is not None]
        if len({one.heads for one in known}) != 1:
            continue
        causal = bool(attribute(node, "is_causal", 0))
        mask = node.inputs[_MASK_INPUT] if len(node.inputs) > _MASK_INPUT else None
        added: Mask | None = None
        if mask is not None and not _all_true(mask):
            added = None if causal else added_mask(edit, node, mask, masks)
            if added is None:
                continue
        fused = _fused(edit, node, known, causal=causal, bias=added.bias if added else None)
        if fused is None:
            continue
        edit.replace(result, fused if added is None else added.without_hidden(edit, node, fused))
        count += 1
    return count


def _plain(node: ir.Node) -> bool:
    """Whether attention is of a supported type, without a cache or anything added to it."""
    return (
        all(attribute(node, name, value) == value for name, value in _NEUTRAL.items())
        and node.outputs[0].dtype in FAST_TYPES
        and not any(value is not None for value in node.inputs[_MASK_INPUT + 1 :])
        and not any(value.uses() or value.is_graph_output() for value in node.outputs[1:])
    )


def _all_true(mask: ir.Value) -> bool:
    content = ir.convenience.get_const_tensor(mask)
    return content is not None and mask.dtype is ir.DataType.BOOL and bool(content.numpy().all())


def _joined(node: ir.Node) -> ir.Value | None:
    """Return the result of attention with its heads joined, if nothing else needs them."""
    value = node.outputs[0]
    for op_type in ("Transpose", "Reshape"):
        if not sole(value):
            return None
        (use,) = value.uses()
        if (use.node.domain, use.node.op_type) != ("", op_type) or use.idx:
            return None
        if op_type == "Transpose" and attribute(use.node, "perm", None) != _HEADS_FIRST:
            return None
        value = use.node.outputs[0]
    before, after = sizes(node.outputs[0]), sizes(value)
    if before is None or after is None or len(before) != _SPLIT_RANK:
        return None
    batch, heads, length, size = before
    whole = heads * size if isinstance(heads, int) and isinstance(size, int) else None
    return value if after == [batch, length, whole] and None not in after else None


def _heads(value: ir.Value | None) -> _Heads | None:
    transpose = made_by(value, "Transpose")
    if transpose is not None:
        return _split(transpose, _HEADS_FIRST, _SPLIT_RANK, None)
    squeeze = made_by(value, "Squeeze")
    part = made_by(squeeze.inputs[0], "Slice") if squeeze is not None else None
    if squeeze is None or part is None or not _is(squeeze.inputs[1], 0):
        return _gathered(value)
    start = numbers(part.inputs[1])
    if start is None or start.size != 1 or not _is(part.inputs[2], int(start.item()) + 1):
        return None
    axes, steps = (*part.inputs[3:], None, None)[:2]
    if not _is(axes, 0) or not (steps is None or _is(steps, 1)):
        return None
    transpose = made_by(part.inputs[0], "Transpose")
    if transpose is None:
        return None
    return _split(transpose, _PARTS_FIRST, _PACKED_RANK, int(start.item()))


def _gathered(value: ir.Value | None) -> _Heads | None:
    gather = made_by(value, "Gather")
    if gather is None or attribute(gather, "axis", 0) != 0:
        return None
    index = numbers(gather.inputs[1])
    transpose = made_by(gather.inputs[0], "Transpose")
    if index is None or index.ndim or transpose is None:
        return None
    return _split(transpose, _PARTS_FIRST, _PACKED_RANK, int(index))


def _is(value: ir.Value | None, number: int) -> bool:
    content = numbers(value)
    return content is not None and content.size == 1 and int(content.item()) == number


def _split(
    transpose: ir.Node, order: tuple[int, ...], rank: int, part: int | None
) -> _Heads | None:
    """Return the heads that a Reshape and a Transpose make of the last axis of a tensor."""
    reshape = made_by(transpose.inputs[0], "Reshape")
    if reshape is None or attribute(transpose, "perm", None) != order:
        return None
    source = reshape.inputs[0]
    before, after = sizes(source), sizes(reshape.outputs[0])
    if source is None or before is None or after is None or len(after) != rank:
        return None
    *parts, heads, size = after[2:]
    if not isinstance(heads, int) or not isinstance(size, int):
        return None
    whole = heads * size * (_PARTS if parts else 1)
    if before != [*after[:2], whole] or None in before or (parts and parts != [_PARTS]):
        return None
    return _Heads(source, heads, part)


def _fused(
    edit: Editor,
    node: ir.Node,
    heads: Sequence[_Heads],
    *,
    causal: bool,
    bias: ir.Value | None,
) -> ir.Value | None:
    settings: dict[str, Any] = {"num_heads": heads[0].heads, "unidirectional": int(causal)}
    if "scale" in node.attributes:
        settings["scale"] = attribute(node, "scale", None)
    if heads[0].part is not None:
        packed = _projection(heads[0].source)
        same = all(one.source is heads[0].source for one in heads)
        if packed is None or not same or [one.part for one in heads] != list(range(_PARTS)):
            return None
        inputs = [packed.source, packed.weight, packed.bias, None, None, bias]
        return edit.add_one(node, "Attention", *_short(inputs), domain=MICROSOFT, **settings)
    if any(one.part is not None for one in heads):
        return None
    found = [_projection(one.source) for one in heads]
    known = [one for one in found if one is not None]
    if len(known) == len(heads) and all(one.source is known[0].source for one in known):
        weight = edit.add_one(node, "Concat", *(one.weight for one in known), axis=1)
        inputs = [known[0].source, weight, _biases(edit, node, found), None, None, bias]
        return edit.add_one(node, "Attention", *_short(inputs), domain=MICROSOFT, **settings)
    products = [
        one.source if projection is None or projection.bias is None else projection.product
        for one, projection in zip(heads, found, strict=True)
    ]
    widths = {(sizes(product) or [None])[-1] for product in products}
    if len(widths) != 1 or (bias is not None and causal):
        return None
    inputs = [*products, _biases(edit, node, found, widths.pop()), None, bias]
    return edit.add_one(node, "MultiHeadAttention", *_short(inputs), domain=MICROSOFT, **settings)


def _short(inputs: list[ir.Value | None]) -> list[ir.Value | None]:
    while inputs[-1] is None:
        inputs.pop()
    return inputs


def _projection(value: ir.Value) -> _Projection | None:
    """Return the linear layer with constant weights that makes a value for attention alone."""
    parts = biased(value)
    product, bias = (value, None) if parts is None else parts
    matmul = made_by(product, "MatMul")
    if matmul is None or not sole(value):
        return None
    source, weight = matmul.inputs
    if source is None or weight is None or not weight.is_initializer():
        return None
    if len(sizes(weight) or ()) != len("kn"):
        return None
    return _Projection(source, product, weight, bias)


def _biases(
    edit: Editor,
    node: ir.Node,
    found: Sequence[_Projection | None],
    width: int | str | None = None,
) -> ir.Value | None:
    """Return the biases of three projections, with zeros where one has none."""
    biases = [None if one is None else one.bias for one in found]
    if not any(biases):
        return None
    if width is None:
        width = next((sizes(bias) or [None])[0] for bias in biases if bias is not None)
    dtype = node.outputs[0].dtype
    if not isinstance(width, int) or dtype is None:
        return None
    zeros = edit.constant(np.zeros(width, dtype.numpy())) if None in biases else None
    return edit.add_one(node, "Concat", *(bias or zeros for bias in biases), axis=0)

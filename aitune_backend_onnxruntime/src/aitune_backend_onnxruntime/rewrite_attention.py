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

from aitune_backend_onnxruntime.graph_edit import (
    MICROSOFT,
    Editor,
    attribute,
    made_by,
    sizes,
    sole,
)
from aitune_backend_onnxruntime.rewrite_heads import PARTS, Heads, heads_of, joined
from aitune_backend_onnxruntime.rewrite_linear import FAST_TYPES, LENGTH_AND_BATCH, biased
from aitune_backend_onnxruntime.rewrite_mask import Mask, added_mask, hides_nothing

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

__all__ = ["attention_with_projections"]

_MASK_INPUT: Final = 3
#: Attributes of Attention that change its result, with the value that does nothing.
_NEUTRAL: Final[dict[str, Any]] = {"softcap": 0.0, "qk_matmul_output_mode": 0}


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
        result = joined(node)
        known = [one for one in map(heads_of, node.inputs[:PARTS]) if one is not None]
        if (
            result is None
            or len(known) != PARTS
            or not _plain(node)
            or {one.by_length for one in known} != {result.by_length}
        ):
            continue
        fused = _with_projections(edit, node, known, masks)
        if fused is None:
            continue
        if result.by_length:
            fused = edit.add_one(node, "Transpose", fused, perm=LENGTH_AND_BATCH)
        edit.replace(result.value, fused)
        count += 1
    return count


def _with_projections(
    edit: Editor, node: ir.Node, heads: Sequence[Heads], masks: dict[ir.Value, Mask]
) -> ir.Value | None:
    if len({one.heads for one in heads}) != 1:
        return None
    causal = bool(attribute(node, "is_causal", 0))
    mask = node.inputs[_MASK_INPUT] if len(node.inputs) > _MASK_INPUT else None
    if mask is None or hides_nothing(mask):
        return _fused(edit, node, heads, causal=causal, bias=None)
    added = None if causal else added_mask(edit, node, mask, masks)
    if added is None:
        return None
    fused = _fused(edit, node, heads, causal=False, bias=added.bias)
    return None if fused is None else added.without_hidden(edit, node, fused)


def _plain(node: ir.Node) -> bool:
    """Whether attention is of a supported type, without a cache or anything added to it."""
    return (
        all(attribute(node, name, value) == value for name, value in _NEUTRAL.items())
        and node.outputs[0].dtype in FAST_TYPES
        and not any(value is not None for value in node.inputs[_MASK_INPUT + 1 :])
        and not any(value.uses() or value.is_graph_output() for value in node.outputs[1:])
    )


def _fused(
    edit: Editor,
    node: ir.Node,
    heads: Sequence[Heads],
    *,
    causal: bool,
    bias: ir.Value | None,
) -> ir.Value | None:
    """Return attention of batch, length, width; a bias is added to the scores."""
    settings: dict[str, Any] = {"num_heads": heads[0].heads, "unidirectional": int(causal)}
    if "scale" in node.attributes:
        settings["scale"] = attribute(node, "scale", None)
    found = [_projection(one.source) for one in heads]
    packed = _packed(edit, heads, found) or _side_by_side(edit, node, heads, found)
    if packed is not None:
        inputs = [packed.source, packed.weight, packed.bias, None, None, bias]
        return edit.add_one(node, "Attention", *_short(inputs), domain=MICROSOFT, **settings)
    queries, keys = sizes(node.inputs[0]), sizes(node.inputs[1])
    # Of fewer queries than keys, causal attention is that of the first ones in ONNX only.
    if (
        any(one.part is not None for one in heads)
        or len({one.width for one in heads}) != 1
        or queries is None
        or keys is None
        or (causal and queries[2] != keys[2])
    ):
        return None
    products = [
        one.source if projection is None or projection.bias is None else projection.product
        for one, projection in zip(heads, found, strict=True)
    ]
    biases = _biases(edit, node, heads, found) if any(one and one.bias for one in found) else None
    inputs = [*products, biases, None, bias]
    return edit.add_one(node, "MultiHeadAttention", *_short(inputs), domain=MICROSOFT, **settings)


def _packed(
    edit: Editor, heads: Sequence[Heads], found: Sequence[_Projection | None]
) -> _Projection | None:
    """Return the projection of queries, keys and values in one, of batch, length, width."""
    first, packed = heads[0], found[0]
    same = all(one.source is first.source for one in heads)
    if packed is None or not same or [one.part for one in heads] != list(range(PARTS)):
        return None
    product = packed.product.producer()
    assert product is not None  # noqa: S101 - it is the product of a projection
    bias = packed.bias or edit.zeros(PARTS * first.width, packed.product)
    packed = attrs.evolve(packed, bias=bias)
    if not first.by_length:
        return packed
    swap = made_by(packed.source, "Transpose")
    source = swap.inputs[0] if swap is not None else None
    if swap is None or source is None or attribute(swap, "perm", None) != LENGTH_AND_BATCH:
        source = edit.add_one(product, "Transpose", packed.source, perm=LENGTH_AND_BATCH)
    return attrs.evolve(packed, source=source)


def _side_by_side(
    edit: Editor, node: ir.Node, heads: Sequence[Heads], found: Sequence[_Projection | None]
) -> _Projection | None:
    """Return three projections of one tensor as one."""
    known = [one for one in found if one is not None]
    if (
        len(known) != len(found)
        or any(one.part is not None for one in heads)
        or len({one.width for one in heads}) != 1
        or len({one.source for one in known}) != 1
    ):
        return None
    weight = edit.add_one(node, "Concat", *(one.weight for one in known), axis=1)
    return attrs.evolve(known[0], weight=weight, bias=_biases(edit, node, heads, found))


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
    if source is None or weight is None:
        return None
    turned = made_by(weight, "Transpose")
    origin = weight if turned is None else turned.inputs[0]
    if origin is None or not origin.is_initializer():
        return None
    if len(sizes(weight) or ()) != len("kn"):
        return None
    return _Projection(source, product, weight, bias)


def _biases(
    edit: Editor, node: ir.Node, heads: Sequence[Heads], found: Sequence[_Projection | None]
) -> ir.Value:
    """Return the biases of three projections, with zeros where one has none.

    Without a bias, ONNX Runtime's Attention crashes on CPUs (1.31.1).
    """
    biases = [
        projection.bias
        if projection is not None and projection.bias is not None
        else edit.zeros(one.width, node.outputs[0])
        for one, projection in zip(heads, found, strict=True)
    ]
    return edit.add_one(node, "Concat", *biases, axis=0)

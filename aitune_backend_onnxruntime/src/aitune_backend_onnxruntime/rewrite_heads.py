"""How heads of attention are split from tensors and joined again in ONNX models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from aitune_backend_onnxruntime.graph_edit import attribute, made_by, numbers, sizes, sole

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["PARTS", "Heads", "Joined", "heads_of", "joined"]

#: Queries, keys and values.
PARTS: Final = 3
_LAST: Final = 2
_HEADS_BACK: Final = (0, 2, 1, 3)
_HEADS_BACK_BY_LENGTH: Final = (2, 0, 1, 3)
_PARTS_FIRST: Final = (2, 0, 3, 1, 4)
_PARTS_FIRST_BY_LENGTH: Final = (3, 1, 2, 0, 4)
_SWAPPED: Final = (1, 0, 2)
_HEADS_RANK: Final = 4


@attrs.frozen(eq=False)
class Heads:
    """Heads of attention.

    Attributes:
        source: What they were split from, of rank 3: batch, length, and the heads of one or three
            tensors.
        heads: Number of heads.
        size: Width of each.
        part: Which of three tensors; None where the source is one.
        by_length: Whether the source is length, batch, and the heads.
    """

    source: ir.Value
    heads: int
    size: int
    part: int | None
    by_length: bool = False

    @property
    def width(self) -> int:
        """Width of all heads of one tensor."""
        return self.heads * self.size


@attrs.frozen(eq=False)
class Joined:
    """Result of attention with its heads joined: batch, length, width.

    Attributes:
        value: The result.
        by_length: Whether it is length, batch, width.
    """

    value: ir.Value
    by_length: bool


def joined(node: ir.Node) -> Joined | None:
    """Return the result of attention with its heads joined, if nothing else needs them."""
    value = node.outputs[0]
    order: object = None
    for op_type in ("Transpose", "Reshape"):
        if not sole(value):
            return None
        (use,) = value.uses()
        if (use.node.domain, use.node.op_type) != ("", op_type) or use.idx:
            return None
        if op_type == "Transpose":
            order = attribute(use.node, "perm", None)
        value = use.node.outputs[0]
    before, after = sizes(node.outputs[0]), sizes(value)
    if before is None or after is None or len(before) != _HEADS_RANK or None in after:
        return None
    batch, heads, length, size = before
    width = heads * size if isinstance(heads, int) and isinstance(size, int) else None
    if order == _HEADS_BACK and after == [batch, length, width]:
        return Joined(value, by_length=False)
    if order == _HEADS_BACK_BY_LENGTH and after == [length, batch, width]:
        return Joined(value, by_length=True)
    return None


def heads_of(value: ir.Value | None) -> Heads | None:
    """Return how a value of batch, heads, length, size was split; None for an unknown way."""
    if (transpose := made_by(value, "Transpose")) is not None:
        return _transposed(transpose)
    if value is not None and made_by(value, "Reshape") is not None:
        return _by_length(value)
    whole, part = _part(value)
    transpose = made_by(whole, "Transpose")
    reshape = made_by(transpose.inputs[0], "Reshape") if transpose is not None else None
    if transpose is None or reshape is None or attribute(transpose, "perm", 0) != _PARTS_FIRST:
        return None
    shape = sizes(reshape.outputs[0])
    if shape is None or shape[2:3] != [PARTS]:
        return None
    return _made(reshape.inputs[0], [*shape[:2]], shape[3:], part)


def _transposed(transpose: ir.Node) -> Heads | None:
    """Return heads that are split by a Reshape and moved by a Transpose."""
    reshape = made_by(transpose.inputs[0], "Reshape")
    if reshape is None or attribute(transpose, "perm", None) != _HEADS_BACK:
        return None
    shape = sizes(reshape.outputs[0]) or []
    found = _made(reshape.inputs[0], shape[:2], shape[2:], None)
    split = made_by(reshape.inputs[0], "Split")
    if found is None or split is None:
        return found
    assert reshape.inputs[0] is not None  # noqa: S101 - Split made it
    return _made(split.inputs[0], shape[:2], shape[2:], reshape.inputs[0].index()) or found


def _by_length(value: ir.Value) -> Heads | None:
    """Return heads as ``nn.MultiheadAttention`` splits them, by length and batch times heads."""
    transpose = made_by(_input(value), "Transpose")
    inner = _input(transpose.outputs[0]) if transpose is not None else None
    if transpose is None or made_by(inner, "Reshape") is None:
        return None
    shape, merged = sizes(value), sizes(inner)
    if (
        attribute(transpose, "perm", None) != _SWAPPED
        or shape is None
        or merged is None
        or len(shape) != _HEADS_RANK
        or [merged[0], *merged[2:]] != shape[2:]
    ):
        return None
    batch, heads, length, size = shape
    whole, part = _part(_input(inner))
    squeeze = made_by(whole, "Squeeze")
    moved = made_by(_input(whole), "Transpose")
    added = made_by(moved.inputs[0], "Unsqueeze") if moved is not None else None
    split = made_by(added.inputs[0], "Reshape") if added is not None else None
    if (
        squeeze is None
        or moved is None
        or added is None
        or split is None
        or attribute(moved, "perm", None) != _PARTS_FIRST_BY_LENGTH
        or not _is(squeeze.inputs[1], -2, 3)
        or not _is(added.inputs[1], 0)
        or not isinstance(heads, int)
        or not isinstance(size, int)
        or sizes(split.outputs[0]) != [length, batch, PARTS, heads * size]
    ):
        return None
    found = _made(split.inputs[0], [length, batch], [heads, size], part)
    return None if found is None else attrs.evolve(found, by_length=True)


def _made(
    source: ir.Value | None,
    outer: list[int | str | None],
    inner: list[int | str | None],
    part: int | None,
) -> Heads | None:
    """Return heads if their source certainly has the sizes that they have."""
    if source is None or len(inner) != _LAST:
        return None
    heads, size = inner
    if not isinstance(heads, int) or not isinstance(size, int):
        return None
    width = heads * size * (1 if part is None else PARTS)
    if None in outer or sizes(source) != [*outer, width]:
        return None
    return Heads(source, heads, size, part)


def _part(value: ir.Value | None) -> tuple[ir.Value | None, int]:
    """Return the tensor, and the index on its first axis, that a value is taken from."""
    if (gather := made_by(value, "Gather")) is not None:
        index = numbers(gather.inputs[1])
        if index is not None and not index.ndim and attribute(gather, "axis", 0) == 0:
            return gather.inputs[0], int(index)
    squeeze = made_by(value, "Squeeze")
    piece = made_by(squeeze.inputs[0], "Slice") if squeeze is not None else None
    if squeeze is None or piece is None or not _is(squeeze.inputs[1], 0):
        return None, 0
    start = numbers(piece.inputs[1])
    axes, steps = (*piece.inputs[3:], None, None)[:2]
    if (
        start is None
        or start.size != 1
        or not _is(piece.inputs[2], int(start.item()) + 1)
        or not _is(axes, 0)
        or not (steps is None or _is(steps, 1))
    ):
        return None, 0
    return piece.inputs[0], int(start.item())


def _input(value: ir.Value | None) -> ir.Value | None:
    node = None if value is None else value.producer()
    return None if node is None else node.inputs[0]


def _is(value: ir.Value | None, *allowed: int) -> bool:
    content = numbers(value)
    return content is not None and content.size == 1 and int(content.item()) in allowed

"""Operators of which kernels of ONNX Runtime 1.31 are wrong, in forms that are right.

- ``Max``, ``Min``, ``Clip``, ``Sign``, ``ReduceMax`` and ``ReduceMin`` of int64 compare the lower
  halves of the numbers on the CPU: the larger of 1 and 2**31 + 1 comes out as 1. ``Greater``,
  ``Less``, ``Where`` and ``TopK`` are right.
- ``Clip`` of floating-point numbers takes the largest finite number for a bound that is not given.
- ``Sign`` of no number is no number, where PyTorch has 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["right_kernels"]

_Form: TypeAlias = "Callable[[ir.tape.Tape, ir.Node], ir.Value | None]"

#: Values up to this are compared right.
_SMALL: Final = 2**31 - 1
#: Operators whose results are sizes or places, however large their inputs are.
_COUNTS: Final = frozenset(["Shape", "Size", "NonZero", "ArgMax", "ArgMin"])


def right_kernels(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace operators by ones whose kernels are right; sizes are left alone.

    Args:
        model: The model; its weights need not be loaded.

    Returns:
        The model itself where nothing is to be replaced, else a new one.
    """
    if not any(node.op_type in _INTEGERS for node in model.graph.node):
        return model
    typed = ir.from_proto(onnx.shape_inference.infer_shapes(model))
    small: set[ir.Value] = set()
    replaced = 0
    for node in list(typed.graph.all_nodes()):
        if node.op_type == "Constant":
            continue
        if node.op_type in _COUNTS or all(_is_small(value, small) for value in node.inputs):
            small.update(node.outputs)
            continue
        tape = ir.tape.Tape()
        result = _replacement(tape, node)
        if result is not None and node.graph is not None:
            replaced += 1
            ir.convenience.replace_nodes_and_values(
                node.graph, node, [node], tape.nodes, node.outputs, [result]
            )
    return ir.to_proto(typed) if replaced else model


def _replacement(tape: ir.tape.Tape, node: ir.Node) -> ir.Value | None:
    value = node.inputs[0] if node.inputs else None
    if node.domain or value is None or value.dtype is None:
        return None
    forms = _INTEGERS if value.dtype == ir.DataType.INT64 else {}
    if value.dtype.is_floating_point():
        forms = _FLOATS
    form = forms.get(node.op_type)
    return None if form is None else form(tape, node)


def _is_small(value: ir.Value | None, small: set[ir.Value]) -> bool:
    """Whether a value is made of sizes, places, truth values and small constants alone."""
    if value is None or value in small or value.dtype == ir.DataType.BOOL:
        return True
    constant = ir.convenience.get_const_tensor(value)
    if constant is None or constant.dtype != ir.DataType.INT64:
        return False
    if isinstance(constant, ir.ExternalTensor):
        return False  # in a file that is not read for it
    return constant.size == 0 or int(np.abs(constant.numpy()).max()) <= _SMALL


def _sign(tape: ir.tape.Tape, node: ir.Node) -> ir.Value:
    dtype = _dtype(node)
    sides = [node.inputs[0], _constant(tape, 0, dtype)]
    to = {"to": dtype.value}
    ones = [tape.op("Cast", [tape.op(name, sides)], to) for name in ("Greater", "Less")]
    return tape.op("Sub", ones)


def _of_all(comparison: str) -> _Form:
    def form(tape: ir.tape.Tape, node: ir.Node) -> ir.Value | None:
        result = node.inputs[0]
        for other in node.inputs[1:]:
            result = tape.op("Where", [tape.op(comparison, [result, other]), result, other])
        return result if len(node.inputs) > 1 else None

    return form


def _clip(tape: ir.tape.Tape, node: ir.Node) -> ir.Value | None:
    result = node.inputs[0]
    for comparison, bound in zip(("Less", "Greater"), node.inputs[1:], strict=False):
        if bound is not None:
            result = tape.op("Where", [tape.op(comparison, [result, bound]), bound, result])
    return None if result is node.inputs[0] else result


def _unbounded_clip(tape: ir.tape.Tape, node: ir.Node) -> ir.Value | None:
    value, *given = node.inputs
    low, high = (*given, None, None)[:2]
    if low is not None and high is not None:
        return None
    low, high = (
        _constant(tape, infinity, _dtype(node)) if bound is None else bound
        for bound, infinity in ((low, -np.inf), (high, np.inf))
    )
    return tape.op("Clip", [value, low, high])


def _reduced(*, largest: bool) -> _Form:
    def form(tape: ir.tape.Tape, node: ir.Node) -> ir.Value | None:
        value = node.inputs[0]
        axes = _axes(node)
        keep = node.attributes.get_int("keepdims", 1)
        if value is None or axes is None:
            return None
        if not axes:
            if keep or node.attributes.get_int("noop_with_empty_axes", 0):
                return None
            value, axes = tape.op("Reshape", [value, _constant(tape, [-1])]), [0]
        one = _constant(tape, [1])
        for axis in axes:
            order = {"axis": axis, "largest": int(largest)}
            value, _ = tape.op_multi_out("TopK", [value, one], order, num_outputs=2)
        return value if keep else tape.op("Squeeze", [value, _constant(tape, axes)])

    return form


def _axes(node: ir.Node) -> list[int] | None:
    """Return the axes that a reduction names, none for all; None where only a run knows them."""
    if "axes" in node.attributes:
        return list(node.attributes["axes"].as_ints())
    if len(node.inputs) == 1 or node.inputs[1] is None:
        return []
    constant = ir.convenience.get_const_tensor(node.inputs[1])
    return None if constant is None else list(map(int, constant.numpy()))


def _dtype(node: ir.Node) -> ir.DataType:
    """Return the dtype of the first input of a node that is replaced, which is known."""
    dtype = None if node.inputs[0] is None else node.inputs[0].dtype
    if dtype is None:
        msg = f"{node.op_type} has an input without a dtype"
        raise ValueError(msg)
    return dtype


def _constant(
    tape: ir.tape.Tape, value: float | list[int], dtype: ir.DataType = ir.DataType.INT64
) -> ir.Value:
    tensor = ir.tensor(np.array(value, dtype.numpy()), dtype)
    return tape.op("Constant", [], {"value": tensor})


_INTEGERS: Final[dict[str, _Form]] = {
    "Sign": _sign,
    "Max": _of_all("Greater"),
    "Min": _of_all("Less"),
    "Clip": _clip,
    "ReduceMax": _reduced(largest=True),
    "ReduceMin": _reduced(largest=False),
}
_FLOATS: Final[dict[str, _Form]] = {"Sign": _sign, "Clip": _unbounded_clip}

"""Linear layers of ONNX models in the forms that ONNX Runtime's CUDA kernels are fast with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import onnx_ir as ir

from aitune_backend_onnxruntime.graph_edit import (
    MICROSOFT,
    Editor,
    attribute,
    made_by,
    sizes,
    sole,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "FAST_TYPES",
    "LENGTH_AND_BATCH",
    "bias_into_gelu",
    "biased",
    "rows_into_product",
    "swaps_around_product",
    "weights_in_order",
]

#: Element types that all fused kernels have on CUDA.
FAST_TYPES: Final = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_GELUS: Final = {"none": "BiasGelu", "tanh": "FastGelu"}
_MATRIX: Final = 2
#: The order of axes that swaps the first two of three.
LENGTH_AND_BATCH: Final = (1, 0, 2)


def biased(value: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """Return product and bias of a value that is ``MatMul(...) + bias`` and used only once.

    The bias is a constant vector along the last axis.
    """
    add = made_by(value, "Add")
    if add is None or value is None or not sole(value):
        return None
    for product, bias in (add.inputs, reversed(add.inputs)):
        width = (sizes(product) or [None])[-1]
        if (
            made_by(product, "MatMul") is not None
            and bias is not None
            and bias.is_initializer()
            and isinstance(width, int)
            and sizes(bias) == [width]
        ):
            assert product is not None  # noqa: S101 - MatMul made it
            return product, bias
    return None


def rows_into_product(edit: Editor) -> int:
    """Make a linear layer on all rows of a tensor a product of the tensor, and a sum."""
    count = 0
    for node in edit.nodes("Gemm"):
        before = made_by(node.inputs[0], "Reshape")
        after = _only_use(node.outputs[0], "Reshape")
        if before is None or after is None or not _is_linear(node):
            continue
        x = _with_axes(edit, before, after, node)
        if x is None:
            continue
        _, weight, *bias = node.inputs
        if attribute(node, "transB", 0):
            weight = edit.turned(node, weight)
        product = edit.add_one(after, "MatMul", x, weight)
        product.shape, product.type = after.outputs[0].shape, after.outputs[0].type
        edit.replace(
            after.outputs[0], edit.add_one(after, "Add", product, bias[0]) if bias else product
        )
        count += 1
    return count


def _is_linear(node: ir.Node) -> bool:
    """Whether a Gemm multiplies rows by a constant matrix, and adds a constant vector or none."""
    _, weight, *bias = node.inputs
    matrix = sizes(weight) or []
    if weight is None or len(matrix) != _MATRIX:
        return False
    columns = matrix[0] if attribute(node, "transB", 0) else matrix[1]
    return (
        weight.is_initializer()
        and not attribute(node, "transA", 0)
        and attribute(node, "alpha", 1.0) == 1
        and attribute(node, "beta", 1.0) == 1
        and all(
            part is not None and part.is_initializer() and sizes(part) == [columns] for part in bias
        )
    )


def _with_axes(edit: Editor, before: ir.Node, after: ir.Node, node: ir.Node) -> ir.Value | None:
    """Return the rows of a Gemm with the axes that its result gets."""
    rows, columns = sizes(node.inputs[0]), sizes(node.outputs[0])
    result, wanted = sizes(after.outputs[0]), after.inputs[1]
    if rows is None or columns is None or result is None or wanted is None:
        return None
    width = rows[-1]
    if len(result) <= _MATRIX or result[-1] != columns[-1] or not isinstance(width, int):
        return None
    shape = [*result[:-1], width]
    source = before.inputs[0]
    if None not in shape and sizes(source) == shape:
        return source
    if sum(not isinstance(size, int) for size in shape) <= 1:
        target = edit.integers(*(size if isinstance(size, int) else -1 for size in shape))
    elif attribute(after, "allowzero", 0):
        outer = edit.add_one(
            after, "Slice", wanted, edit.integers(0), edit.integers(len(shape) - 1)
        )
        target = edit.add_one(after, "Concat", outer, edit.integers(width), axis=0)
    else:
        return None
    reshaped = edit.add_one(after, "Reshape", source, target)
    reshaped.type, reshaped.shape = node.outputs[0].type, ir.Shape(shape)
    return reshaped


def _only_use(value: ir.Value, op_type: str) -> ir.Node | None:
    """Return what alone uses a value, as its first input, if it is one of an operator of ONNX."""
    if not sole(value):
        return None
    (use,) = value.uses()
    fits = (use.node.domain, use.node.op_type, use.idx) == ("", op_type, 0)
    return use.node if fits else None


def swaps_around_product(edit: Editor) -> int:
    """Let a linear layer work without a swap of batch and length before it and one after it."""
    count = 0
    for node in edit.nodes("Transpose"):
        matmul = _only_use(node.outputs[0], "MatMul")
        if matmul is None:
            continue
        weight, result, bias = matmul.inputs[1], matmul.outputs[0], None
        add = _only_use(result, "Add")
        if add is not None:
            parts = biased(add.outputs[0])
            result, bias = add.outputs[0], None if parts is None else parts[1]
        back = _only_use(result, "Transpose")
        if (
            back is None
            or (add is not None and bias is None)
            or len(sizes(weight) or ()) != _MATRIX
            or any(attribute(one, "perm", None) != LENGTH_AND_BATCH for one in (node, back))
        ):
            continue
        product = edit.add_one(back, "MatMul", node.inputs[0], weight)
        product.type, product.shape = back.outputs[0].type, back.outputs[0].shape
        new = product if bias is None else edit.add_one(back, "Add", product, bias)
        edit.replace(back.outputs[0], new)
        count += 1
    return count


def bias_into_gelu(edit: Editor) -> int:
    """Make ``Gelu(MatMul(...) + bias)`` one kernel after the product."""
    count = 0
    for node in edit.nodes("Gelu"):
        parts = biased(node.inputs[0])
        fused = _GELUS.get(attribute(node, "approximate", "none"))
        if parts is None or fused is None or node.outputs[0].dtype not in FAST_TYPES:
            continue
        edit.replace(node.outputs[0], edit.add_one(node, fused, *parts, domain=MICROSOFT))
        count += 1
    return count


def weights_in_order(edit: Editor) -> int:
    """Transpose constant weights of float32 products once instead of in each product.

    With full float32 precision, cuBLAS has slow kernels for few rows and a transposed matrix.
    """
    nodes = list(_transposing(edit))
    for node in nodes:
        left, weight, *rest = node.inputs
        in_order = edit.turned(node, weight)
        kept = {name: value.value for name, value in node.attributes.items() if name != "transB"}
        edit.replace(node.outputs[0], edit.add_one(node, "Gemm", left, in_order, *rest, **kept))
    return len(nodes)


def _transposing(edit: Editor) -> Iterator[ir.Node]:
    for node in edit.nodes("Gemm"):
        weight = node.inputs[1]
        if (
            attribute(node, "transB", 0)
            and weight is not None
            and weight.is_initializer()
            and weight.dtype is ir.DataType.FLOAT
            and len(sizes(weight) or ()) == _MATRIX
        ):
            yield node

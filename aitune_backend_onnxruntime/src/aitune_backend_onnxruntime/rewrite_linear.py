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

__all__ = ["FAST_TYPES", "bias_into_gelu", "biased", "weights_in_order"]

#: Element types that all fused kernels have on CUDA.
FAST_TYPES: Final = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_GELUS: Final = {"none": "BiasGelu", "tanh": "FastGelu"}
_MATRIX: Final = 2


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
        in_order = edit.add_one(node, "Transpose", weight, perm=[1, 0])
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

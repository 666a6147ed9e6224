"""Convolutions and pooling of ONNX models in the forms that are fast on CUDA."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from aitune_backend_onnxruntime.graph_edit import Editor, attribute, made_by, numbers, sizes, sole

__all__ = ["means_into_pooling", "patches_into_product"]

_IMAGE_RANK: Final = 4
_HEIGHT_AND_WIDTH: Final = [2, 3]


def patches_into_product(edit: Editor) -> int:
    """Make a convolution over patches that do not overlap, and are then a sequence, a product."""
    count = 0
    for node in edit.nodes("Transpose"):
        reshape = made_by(node.inputs[0], "Reshape")
        convolution = made_by(reshape.inputs[0], "Conv") if reshape is not None else None
        if (
            reshape is None
            or convolution is None
            or attribute(node, "perm", None) != (0, 2, 1)
            or not sole(reshape.outputs[0])
            or not sole(convolution.outputs[0])
        ):
            continue
        plan = _patches(convolution)
        if plan is None or (sizes(reshape.outputs[0]) or [])[1:] != [plan.width, plan.patches]:
            continue
        edit.replace(node.outputs[0], _product(edit, convolution, plan))
        count += 1
    return count


class _Patches:
    """Sizes of a convolution over patches."""

    def __init__(self, weight: tuple[int, ...], image: tuple[int, ...]) -> None:
        self.width, self.channels, self.height, self.breadth = weight
        self.rows, self.columns = image[1] // self.height, image[2] // self.breadth

    @property
    def patches(self) -> int:
        return self.rows * self.columns

    @property
    def elements(self) -> int:
        return self.channels * self.height * self.breadth


def _patches(node: ir.Node) -> _Patches | None:
    """Return the sizes of a convolution if its patches tile the image."""
    weight, image = sizes(node.inputs[1]), sizes(node.inputs[0])
    known = (*(weight or [None]), *(image or [None])[1:])
    if not all(isinstance(size, int) for size in known) or len(known) != 2 * _IMAGE_RANK - 1:
        return None
    weight_sizes = tuple(size for size in known[:_IMAGE_RANK] if isinstance(size, int))
    image_sizes = tuple(size for size in known[_IMAGE_RANK:] if isinstance(size, int))
    kernel = weight_sizes[2:]
    tiles = (
        attribute(node, "group", 1) == 1
        and attribute(node, "auto_pad", "NOTSET") in {"NOTSET", "VALID"}
        and not any(attribute(node, "pads", ()))
        and set(attribute(node, "dilations", (1,))) == {1}
        and tuple(attribute(node, "strides", (1, 1))) == kernel
        and weight_sizes[1] == image_sizes[0]
        and all(size % step == 0 for size, step in zip(image_sizes[1:], kernel, strict=True))
        and node.inputs[1] is not None
        and node.inputs[1].is_initializer()
    )
    return _Patches(weight_sizes, image_sizes) if tiles else None


def _product(edit: Editor, node: ir.Node, plan: _Patches) -> ir.Value:
    image, weight, *bias = node.inputs
    tiled = edit.add_one(
        node,
        "Reshape",
        image,
        edit.integers(-1, plan.channels, plan.rows, plan.height, plan.columns, plan.breadth),
    )
    ordered = edit.add_one(node, "Transpose", tiled, perm=[0, 2, 4, 1, 3, 5])
    rows = edit.add_one(node, "Reshape", ordered, edit.integers(-1, plan.patches, plan.elements))
    flat = edit.add_one(node, "Reshape", weight, edit.integers(plan.width, plan.elements))
    matrix = edit.add_one(node, "Transpose", flat, perm=[1, 0])
    product = edit.add_one(node, "MatMul", rows, matrix)
    return edit.add_one(node, "Add", product, bias[0]) if bias else product


def means_into_pooling(edit: Editor) -> int:
    """Make means over height and width average pooling, which has the faster kernel."""
    count = 0
    for node in edit.nodes("ReduceMean"):
        image = node.inputs[0]
        rank = len(sizes(image) or ())
        listed = numbers(node.inputs[1]) if len(node.inputs) > 1 else attribute(node, "axes", None)
        if listed is None or image is None or rank != _IMAGE_RANK:
            continue
        axes = sorted(int(axis) % rank for axis in listed)
        if axes != _HEIGHT_AND_WIDTH or image.dtype not in {
            ir.DataType.FLOAT,
            ir.DataType.FLOAT16,
        }:
            continue
        pooled = edit.add_one(node, "GlobalAveragePool", image)
        if not attribute(node, "keepdims", 1):
            pooled = edit.add_one(node, "Squeeze", pooled, edit.integers(*_HEIGHT_AND_WIDTH))
        edit.replace(node.outputs[0], pooled)
        count += 1
    return count

"""What an ONNX file says about itself, read without its weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

import attrs
import onnx
from google.protobuf.message import DecodeError
from onnx.external_data_helper import uses_external_data

from aitune_backend_onnxruntime.parts import parts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["ModelFacts", "ModelFileError", "Value", "facts_of", "read_model", "trusted_path"]


class ModelFileError(Exception):
    """An ONNX file that must not be given to ONNX Runtime; the caller makes a public error."""


@attrs.frozen
class Value:
    """An input, output or intermediate of a graph.

    Attributes:
        name: Its name.
        elem_type: ``TensorProto.DataType``; 0 where not stated.
        shape: Sizes, with None for a symbol or an unknown size; None where no rank is stated.
    """

    name: str
    elem_type: int
    shape: tuple[int | None, ...] | None


_FLOAT: Final = onnx.TensorProto.FLOAT
_HALF: Final = onnx.TensorProto.FLOAT16
#: Operators that sum up products, for which GPUs have a faster and coarser float32.
_PRODUCTS: Final = frozenset(
    {"Attention", "Conv", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "RNN"}
)


@attrs.frozen(kw_only=True)
class ModelFacts:
    """The parts of a model file that matter before it is run.

    Attributes:
        inputs: Inputs that a run must bind, in order.
        outputs: Outputs, in order.
        opset: Version of the default operator set.
        operators: Number of nodes per operator, those of sub-graphs and functions included.
        external_files: Files next to the model that hold weights, in order of first use.
        half_convolutions: Whether convolutions work on float16, for which channels last is faster.
        float32_products: Whether products or convolutions may work on float32.
        results: First output of each named node of the main graph, by node name.
        parts: Parts of the module, by the names of nodes and values that come from them.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    opset: int
    operators: Mapping[str, int]
    external_files: tuple[str, ...]
    half_convolutions: bool
    float32_products: bool
    results: Mapping[str, Value]
    parts: Mapping[str, str]


def read_model(path: Path) -> onnx.ModelProto:
    """Read a model's structure; external weights stay on disk.

    Raises:
        ModelFileError: The file is no ONNX model.
    """
    try:
        return onnx.load(path, load_external_data=False)
    except (DecodeError, OSError) as error:
        msg = f"{path.name} cannot be read as an ONNX model: {error}"
        raise ModelFileError(msg) from error


def facts_of(model: onnx.ModelProto) -> ModelFacts:
    """Collect the facts of a model."""
    nodes = list(_nodes(model.graph))
    for function in model.functions:
        for node in function.node:
            nodes.extend(_with_children(node))
    weights = {tensor.name for tensor in model.graph.initializer}
    known = [*model.graph.value_info, *model.graph.output]
    values = {info.name: _value(info) for info in known}
    return ModelFacts(
        inputs=tuple(_value(info) for info in model.graph.input if info.name not in weights),
        outputs=tuple(_value(info) for info in model.graph.output),
        opset=max((entry.version for entry in model.opset_import if not entry.domain), default=0),
        operators=Counter(node.op_type for node in nodes),
        external_files=tuple(dict.fromkeys(_external_files(model, nodes))),
        half_convolutions=any(
            node.op_type == "Conv"
            and node.output[0] in values
            and values[node.output[0]].elem_type == _HALF
            for node in model.graph.node
        ),
        float32_products=any(_may_be_float32_product(node, values) for node in nodes),
        results={
            node.name: values[node.output[0]]
            for node in model.graph.node
            if node.output and node.output[0] in values
        },
        parts=parts_of(nodes),
    )


def _may_be_float32_product(node: onnx.NodeProto, values: Mapping[str, Value]) -> bool:
    return node.op_type in _PRODUCTS and any(
        name not in values or values[name].elem_type == _FLOAT for name in node.output
    )


def trusted_path(path: Path, allowed: Mapping[str, Path] | None = None) -> ModelFacts:
    """Check that a model file that came from elsewhere can be given to ONNX Runtime.

    Args:
        path: The model file.
        allowed: Files that the model may take weights from, by name relative to its folder.

    Raises:
        ModelFileError: The file is no model, holds a compiled engine (native code), or refers to
            files that it may not read.
    """
    facts = facts_of(read_model(path))
    if "EPContext" in facts.operators:
        msg = f"{path.name} holds an EPContext node: a compiled engine, which is native code"
        raise ModelFileError(msg)
    for name in facts.external_files:
        parts = PurePosixPath(name).parts
        inside = parts and not Path(name).is_absolute() and ".." not in parts and "\\" not in name
        target = path.parent / name
        listed = allowed is None or name in allowed
        if not inside or not listed or target.is_symlink() or not target.is_file():
            msg = f"{path.name} takes weights from {name!r}, which is not one of its own files"
            raise ModelFileError(msg)
    return facts


def _value(info: onnx.ValueInfoProto) -> Value:
    tensor = info.type.tensor_type
    shape = None
    if tensor.HasField("shape"):
        shape = tuple(
            dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim
        )
    return Value(info.name, tensor.elem_type, shape)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield from _with_children(node)


def _with_children(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    yield node
    for graph in _children(node):
        yield from _nodes(graph)


def _children(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def _external_files(model: onnx.ModelProto, nodes: list[onnx.NodeProto]) -> Iterator[str]:
    graphs = [model.graph, *(graph for node in nodes for graph in _children(node))]
    tensors = [tensor for graph in graphs for tensor in graph.initializer]
    for graph in graphs:
        for sparse in graph.sparse_initializer:
            tensors += (sparse.values, sparse.indices)
    for node in nodes:
        for attribute in node.attribute:
            tensors += (attribute.t, *attribute.tensors)
    for tensor in tensors:
        if uses_external_data(tensor):
            yield from (entry.value for entry in tensor.external_data if entry.key == "location")

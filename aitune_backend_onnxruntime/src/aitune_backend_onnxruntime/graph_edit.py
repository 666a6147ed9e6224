"""Steps through an ONNX graph, and changes of it, for rules that rewrite models."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MICROSOFT", "Editor", "attribute", "made_by", "numbers", "same_shape", "sizes", "sole"]

#: Domain of ONNX Runtime's own operators.
MICROSOFT: Final = "com.microsoft"
#: Elements up to which a constant is read.
_SMALL: Final = 1024


def made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node that makes a value if it is one of an operator of ONNX itself."""
    node = None if value is None else value.producer()
    return node if node is not None and (node.domain, node.op_type) == ("", op_type) else None


def sole(value: ir.Value) -> bool:
    """Whether a value is used in one place only, inside the graph."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def attribute(node: ir.Node, name: str, default: Any) -> Any:  # noqa: ANN401
    """Return an attribute's value."""
    found = node.attributes.get(name)
    return default if found is None else found.value


def sizes(value: ir.Value | None) -> list[int | str | None] | None:
    """Return the sizes of a value, a name for one that varies; None where no rank is known."""
    if value is None or value.shape is None:
        return None
    return [size if isinstance(size, int) else size.value for size in value.shape]


def same_shape(one: ir.Value, other: ir.Value) -> bool:
    """Whether two values certainly have the same shape."""
    shape = sizes(one)
    return shape is not None and None not in shape and shape == sizes(other)


def numbers(value: ir.Value | None) -> np.ndarray[Any, Any] | None:
    """Return the content of a small constant."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None or tensor.size > _SMALL else tensor.numpy()


class Editor:
    """Adds nodes to a graph.

    Args:
        graph: The main graph of a model.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self._numbers = itertools.count()

    def nodes(self, op_type: str) -> Iterator[ir.Node]:
        """Yield the nodes of an operator of ONNX itself; the graph may change meanwhile."""
        for node in list(self.graph):
            if (node.domain, node.op_type) == ("", op_type):
                yield node

    def add(
        self,
        before: ir.Node,
        op_type: str,
        *inputs: ir.Value | None,
        domain: str = "",
        outputs: int = 1,
        **attributes: Any,  # noqa: ANN401
    ) -> list[ir.Value]:
        """Put a node before another one, and return its outputs."""
        name = f"aitune_{op_type}_{next(self._numbers)}"
        node = ir.node(
            op_type, list(inputs), attributes, domain=domain, num_outputs=outputs, name=name
        )
        for index, value in enumerate(node.outputs):
            value.name = f"{name}_{index}"
        self.graph.insert_before(before, node)
        return list(node.outputs)

    def add_one(
        self,
        before: ir.Node,
        op_type: str,
        *inputs: ir.Value | None,
        domain: str = "",
        **attributes: Any,  # noqa: ANN401
    ) -> ir.Value:
        """Put a node with one output before another one, and return the output."""
        return self.add(before, op_type, *inputs, domain=domain, **attributes)[0]

    def turned(self, before: ir.Node, matrix: ir.Value | None) -> ir.Value:
        """Put the transposition of a matrix before a node."""
        result = self.add_one(before, "Transpose", matrix, perm=[1, 0])
        if matrix is not None and matrix.shape is not None:
            result.type, result.shape = matrix.type, ir.Shape(reversed(matrix.shape))
        return result

    def constant(self, content: np.ndarray[Any, Any]) -> ir.Value:
        """Return a new small constant."""
        name = f"aitune_constant_{next(self._numbers)}"
        tensor = ir.tensor(content, name=name)
        value = ir.Value(
            name=name,
            shape=ir.Shape(content.shape),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self.graph.register_initializer(value)
        return value

    def integers(self, *content: int) -> ir.Value:
        """Return a new constant list of integers."""
        return self.constant(np.array(content, np.int64))

    def zeros(self, size: int, like: ir.Value) -> ir.Value:
        """Return a new constant vector of zeros, of a value's type."""
        assert like.dtype is not None  # noqa: S101 - rules look at the type first
        return self.constant(np.zeros(size, like.dtype.numpy()))

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Let everything that uses a value use another one, which takes over its name."""
        new.type, new.shape = old.type, old.shape
        old.name, new.name = new.name, old.name
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)

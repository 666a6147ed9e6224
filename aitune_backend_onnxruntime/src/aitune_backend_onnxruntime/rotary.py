"""Rotary embeddings made for any batch.

The exporter fuses them into ``RotaryEmbedding`` nodes whose cosines and sines may have a batch of
one, as eager broadcasts them. ONNX wants the batch of the input there, and so does ONNX Runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from onnx import helper, numpy_helper

if TYPE_CHECKING:
    import onnx

__all__ = ["broadcast_rotary_caches"]

#: Input, cosines and sines; with position ids as well, the caches have no batch.
_INPUTS: Final = 3
_ONES: Final = "rotary_ones"


def broadcast_rotary_caches(model: onnx.ModelProto) -> None:
    """Expand the cosines and sines of rotary embeddings to the batch of their input, in place.

    Args:
        model: The model; its weights need not be loaded.
    """
    graph = model.graph
    batches = {
        value.name: value.type.tensor_type.shape.dim[0]
        for value in (*graph.input, *graph.value_info)
        if value.type.tensor_type.shape.dim
    }
    expanded: dict[tuple[str, str], str] = {}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type == "RotaryEmbedding" and not node.domain and len(node.input) == _INPUTS:
            batch = batches.get(node.input[0])
            for place, cache in list(enumerate(node.input))[1:]:
                if batch is not None and batches.get(cache) == batch:
                    continue
                key = (cache, str(batch))
                if batch is None or key not in expanded:
                    expanded[key] = f"{cache}_expanded_{len(nodes)}"
                    nodes += _expansion(node.input[0], cache, expanded[key])
                node.input[place] = expanded[key]
        nodes.append(node)
    if expanded:
        graph.initializer.append(numpy_helper.from_array(np.ones(2, np.int64), _ONES))
        del graph.node[:]
        graph.node.extend(nodes)


def _expansion(source: str, cache: str, result: str) -> list[onnx.NodeProto]:
    """Nodes that give a cache the batch of a tensor."""
    batch, shape = f"{result}_batch", f"{result}_shape"
    return [
        helper.make_node("Shape", [source], [batch], name=batch, start=0, end=1),
        helper.make_node("Concat", [batch, _ONES], [shape], name=shape, axis=0),
        helper.make_node("Expand", [cache, shape], [result], name=result),
    ]

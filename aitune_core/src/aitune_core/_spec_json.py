"""Graph specs as JSON-able data."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from aitune_core._tree_json import structure_from_json, structure_to_json
from aitune_core.conditions import SizeCondition
from aitune_core.specs import BatchDim, DynamicDim, GraphSpec, TensorSpec, dtype_name

if TYPE_CHECKING:
    import cattrs

__all__ = ["graph_from_json", "graph_to_json"]


@functools.cache
def _converter() -> cattrs.Converter:
    import cattrs  # noqa: PLC0415 - slow to import, needed for checkpoints only

    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_unstructure_hook(torch.dtype, dtype_name)
    converter.register_structure_hook(torch.dtype, lambda data, _: _dtype(data))
    converter.register_unstructure_hook_func(
        lambda kind: isinstance(kind, type) and issubclass(kind, DynamicDim), _dim_to_json
    )
    converter.register_structure_hook(int | DynamicDim, lambda data, _: _size(data))
    return converter


def _dtype(data: object) -> torch.dtype:
    found = getattr(torch, data, None) if isinstance(data, str) else None
    if not isinstance(found, torch.dtype):
        msg = f"unknown dtype {data!r:.80}"
        raise ValueError(msg)  # noqa: TRY004
    return found


def _dim_to_json(dim: DynamicDim) -> dict[str, Any]:
    return {
        "name": dim.name,
        "min": dim.min,
        "max": dim.max,
        "opt": dim.opt,
        "batch": isinstance(dim, BatchDim),
    }


def _size(data: Any) -> int | DynamicDim:  # noqa: ANN401
    if isinstance(data, int) and not isinstance(data, bool) and data >= 0:
        return data
    if not isinstance(data, dict) or set(data) != {"name", "min", "max", "opt", "batch"}:
        msg = f"a size must be an integer or a dim, got {data!r:.80}"
        raise ValueError(msg)
    kind = BatchDim if data["batch"] else DynamicDim
    return kind(name=data["name"], min=data["min"], max=data["max"], opt=data["opt"])


def graph_to_json(graph: GraphSpec) -> dict[str, Any]:
    """Return ``graph`` as JSON-able data.

    Raises:
        TreeError: A container or value of its structures cannot be restored.
    """
    converter = _converter()
    return {
        "name": graph.name,
        "inputs": [_tensor_to_json(spec, converter) for spec in graph.inputs],
        "outputs": [_tensor_to_json(spec, converter) for spec in graph.outputs],
        "call_structure": [structure_to_json(child, "call") for child in graph.call_structure],
        "result_structure": structure_to_json(graph.result_structure, "out"),
        "mutated_inputs": list(graph.mutated_inputs),
        "conditions": [condition.text for condition in graph.conditions],
    }


def _tensor_to_json(spec: TensorSpec, converter: cattrs.Converter) -> dict[str, Any]:
    data: dict[str, Any] = converter.unstructure(spec)
    data["shape"] = [converter.unstructure(size) for size in spec.shape]
    return data


def graph_from_json(data: Mapping[str, Any]) -> GraphSpec:
    """Return the graph that `graph_to_json` made ``data`` from.

    Raises:
        TreeError: A structure is malformed or names an unregistered type.
        KeyError, TypeError, ValueError: The data is malformed.
    """
    converter = _converter()
    try:
        inputs = tuple(converter.structure(spec, TensorSpec) for spec in data["inputs"])
        outputs = tuple(converter.structure(spec, TensorSpec) for spec in data["outputs"])
    except ExceptionGroup as error:  # cattrs gathers the errors of all fields
        msg = f"a tensor of graph {data['name']!r:.80} is malformed: {error.exceptions[0]!r:.200}"
        raise ValueError(msg) from error
    return GraphSpec(
        name=str(data["name"]),
        inputs=inputs,
        outputs=outputs,
        call_structure=tuple(structure_from_json(child) for child in data["call_structure"]),
        result_structure=structure_from_json(data["result_structure"]),
        mutated_inputs=tuple(int(index) for index in data["mutated_inputs"]),
        conditions=tuple(SizeCondition(text) for text in data["conditions"]),
    )

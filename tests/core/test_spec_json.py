from __future__ import annotations

import json
import keyword
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from treedata import Plain, stored_values, tensors, trees

from aitune_core import BatchDim, DynamicDim, GraphSpec, TensorSpec
from aitune_core._spec_json import graph_from_json, graph_to_json
from aitune_core._trees import HOLE, TreeError, flatten

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
names = st.from_regex(r"[a-z][a-z_0-9]{0,5}", fullmatch=True).filter(
    lambda name: not keyword.iskeyword(name)
)
sizes = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)).map(sorted)
dims = st.builds(
    lambda name, size, kind, opt: kind(
        name=name, min=size[0], max=size[2], opt=size[1] if opt else None
    ),
    names,
    sizes,
    st.sampled_from([DynamicDim, BatchDim]),
    st.booleans(),
)
tensor_specs = st.builds(
    TensorSpec,
    name=names,
    path=st.text(max_size=8),
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 9) | dims, max_size=3).map(tuple),
    device_type=st.sampled_from(["cpu", "cuda"]),
)
structures = trees(tensors | stored_values, stored=True).map(lambda value: flatten(value, []))
graphs = st.builds(
    GraphSpec,
    name=names,
    inputs=st.lists(tensor_specs, max_size=3).map(tuple),
    outputs=st.lists(tensor_specs, max_size=3).map(tuple),
    call_structure=st.lists(structures, max_size=2).map(tuple),
    result_structure=structures,
    mutated_inputs=st.lists(st.integers(0, 3), max_size=2).map(tuple),
)
SPEC = TensorSpec(name="x", path="x", dtype=torch.float32, shape=(BatchDim(1, 2), 3))
GRAPH = GraphSpec(
    name="g", inputs=(SPEC,), outputs=(), call_structure=(HOLE,), result_structure=HOLE
)


@given(graphs)
def test_graphs_round_trip_through_json(graph: GraphSpec) -> None:
    restored = graph_from_json(json.loads(json.dumps(graph_to_json(graph), allow_nan=False)))
    assert restored == graph
    assert hash(restored) == hash(graph)
    for old, new in zip(graph.inputs, restored.inputs, strict=True):
        assert [type(size) for size in old.shape] == [type(size) for size in new.shape]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "nn"),
        ("dtype", 3),
        ("dtype", "float33"),
        ("shape", [-1]),
        ("shape", [True]),
        ("shape", ["1"]),
        ("shape", [{"name": "b", "min": 1, "max": 2}]),
        ("shape", [{"name": "b", "min": 2, "max": 1, "opt": None, "batch": True}]),
        ("surplus", 1),
    ],
)
def test_malformed_tensor_specs_are_refused(field: str, value: object) -> None:
    data = graph_to_json(GRAPH)
    data["inputs"][0][field] = value
    with pytest.raises(Exception) as caught:  # noqa: PT011 - cattrs groups its errors
        graph_from_json(data)
    assert isinstance(caught.value, ValueError | TypeError | KeyError | ExceptionGroup)


@pytest.mark.parametrize("field", ["name", "inputs", "outputs", "call_structure"])
def test_missing_fields_are_refused(field: str) -> None:
    data: dict[str, Any] = graph_to_json(GRAPH)
    del data[field]
    with pytest.raises(KeyError):
        graph_from_json(data)


def test_unstorable_results_are_refused_naming_the_type() -> None:
    graph = attrs.evolve(GRAPH, result_structure=flatten(Plain(1, 2), []))
    with pytest.raises(TreeError) as caught:
        graph_to_json(graph)
    assert caught.value.path == "out"
    assert "treedata.Plain" in caught.value.reason

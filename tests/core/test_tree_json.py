from __future__ import annotations

import json
import sys
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor
from treedata import Color, Plain, Point, Registered, same, stored_values, tensors, trees

from aitune_core._tree_json import structure_from_json, structure_to_json
from aitune_core._trees import HOLE, SCALAR_HOLE, TreeError, flatten, unflatten


def through_json(structure: tuple[Any, ...]) -> tuple[Any, ...]:
    return structure_from_json(
        json.loads(json.dumps(structure_to_json(structure), allow_nan=False))
    )


@given(trees(tensors | stored_values, stored=True))
def test_structures_round_trip_through_json(value: Any) -> None:
    leaves: list[Tensor] = []
    structure = flatten(value, leaves)
    restored = through_json(structure)
    assert restored == structure
    assert hash(restored) == hash(structure)
    assert same(unflatten(restored, iter(leaves)), value)


def test_holes_stay_the_same_object_and_number_holes_keep_their_type() -> None:
    assert through_json(HOLE) is HOLE
    assert through_json((SCALAR_HOLE, float)) == (SCALAR_HOLE, float)
    assert through_json(("list", ((SCALAR_HOLE, int), HOLE))) == (
        "list",
        ((SCALAR_HOLE, int), HOLE),
    )


def test_results_of_torch_functions_round_trip() -> None:
    leaves: list[Tensor] = []
    structure = flatten(torch.sort(torch.tensor([2.0, 1.0])), leaves)
    restored = unflatten(through_json(structure), iter(leaves))
    assert isinstance(restored, torch.return_types.sort)
    assert restored.values.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Plain(1, 2), "Plain"),
        (Point(1, 2), "Point"),
        ([Color.RED], "Color"),
        (slice(1, 2), "slice"),
        (b"x", "bytes"),
        (int, "type"),
        (np.float64(1.5), "float64"),
        (defaultdict(list, {"a": [1]}), "defaultdict"),
    ],
)
def test_what_cannot_be_restored_is_refused_naming_its_type(value: object, named: str) -> None:
    with pytest.raises(TreeError) as caught:
        structure_to_json(flatten(value, []), "out")
    assert caught.value.path == "out"
    assert named in caught.value.reason


@pytest.mark.parametrize(
    "data",
    [
        None,
        1,
        "**",
        [],
        {},
        {"value": 1.5},
        {"value": {"float": "x"}},
        {"value": {"float": 1}},
        {"value": {"complex": ["0x0p+0"]}},
        {"value": {"device": "nowhere"}},
        {"value": {"torch": "nn"}},
        {"value": {"torch": 3}},
        {"value": {"python": "os.system"}},
        {"value": {"float": "0x0p+0", "more": 1}},
        {"list": 3},
        {"tuple": ["?"]},
        {"dict": ["*"], "keys": []},
        {"dict": ["*"], "keys": [["float", 1.0]]},
        {"dict": ["*"], "keys": [["int", True]]},
        {"dict": ["*"], "keys": ["a"]},
        {"dict": ["*"]},
        {"scalar": "complex"},
        {"type": 3, "children": []},
        {"type": "no.such.Type", "children": []},
        {"type": "torch.return_types.no_such", "children": []},
        {"type": "torch.return_types.__name__", "children": []},
        {"type": "collections.OrderedDict", "context": ["a"], "children": "*"},
    ],
)
def test_malformed_data_is_refused(data: object) -> None:
    with pytest.raises(TreeError):
        structure_from_json(data)


@pytest.mark.parametrize("scalar", [[], {}, ["int"]])
def test_unhashable_number_kinds_are_refused(scalar: object) -> None:
    with pytest.raises(TreeError):
        structure_from_json({"scalar": scalar})


@pytest.mark.parametrize("name", ["collections.defaultdict", "collections.namedtuple"])
def test_reading_imports_no_module_that_the_data_names(name: str) -> None:
    sys.modules.pop("this", None)
    data = {"type": name, "context": {"default_factory_module": "this"}, "children": []}
    with pytest.raises(TreeError):
        structure_from_json(data)
    assert "this" not in sys.modules


def test_registered_types_are_found_by_name() -> None:
    data = structure_to_json(flatten(Registered(1, torch.ones(1)), []))
    assert data["type"] == "treedata.Registered"
    assert same(unflatten(structure_from_json(data), iter([2])), Registered(1, 2))
    ordered = structure_to_json(flatten(OrderedDict(a=1), []))
    assert ordered["type"] == "collections.OrderedDict"

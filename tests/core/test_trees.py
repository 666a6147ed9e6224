from __future__ import annotations

import dataclasses
import pickle
import types
from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor
from treedata import Color, Output, Plain, Point, Registered, same, tensors, trees, values

from aitune_core._trees import (
    HOLE,
    SCALAR_HOLE,
    TreeError,
    flatten,
    hole_paths,
    leaf_paths,
    map_leaves,
    unflatten,
)

ONE = torch.ones(1)


def structure_of(value: object) -> tuple[Any, ...]:
    return flatten(value, [])


@given(trees(tensors | values, stored=False))
def test_flatten_and_unflatten_are_inverse(value: Any) -> None:
    leaves: list[Tensor] = []
    structure = flatten(value, leaves, "x")
    assert same(unflatten(structure, iter(leaves)), value)
    assert hash(structure) == hash(flatten(value, [], "x"))
    assert structure == flatten(value, [], "x")


@given(trees(tensors | values, stored=False))
def test_there_is_one_distinct_path_per_tensor(value: Any) -> None:
    leaves: list[Tensor] = []
    paths = hole_paths(flatten(value, leaves, "x"), "x")
    assert len(paths) == len(leaves)
    assert all(path.startswith("x") for path in paths)


@given(trees(tensors | values, stored=False))
def test_structures_survive_pickle(value: Any) -> None:
    leaves: list[Tensor] = []
    structure = flatten(value, leaves, "x")
    copy = pickle.loads(pickle.dumps(structure))
    assert copy == structure
    assert hole_paths(copy, "x") == hole_paths(structure, "x")
    assert same(unflatten(copy, iter(leaves)), value)


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        (ONE, ["x"]),
        ([ONE, (ONE, 1)], ["x[0]", "x[1][0]"]),
        ({"a": ONE, 2: ONE, True: 3}, ["x['a']", "x[2]"]),
        (Point(ONE, ONE), ["x.x", "x.y"]),
        (Plain(ONE, [ONE]), ["x.first", "x.second[0]"]),
        (Registered(1, ONE), ["x.second"]),
        (OrderedDict(b=ONE, a=ONE), ["x['b']", "x['a']"]),
        (Output(a=None, b=ONE), ["x['b']"]),
        (defaultdict(list, {"k": [ONE]}), ["x['k'][0]"]),
        (deque([ONE]), ["x[0]"]),
        (torch.sort(torch.ones(2)), ["x.values", "x.indices"]),
    ],
)
def test_paths_read_as_python(value: object, paths: list[str]) -> None:
    found = hole_paths(structure_of(value), "x")
    if isinstance(value, deque | tuple) and not isinstance(value, Point):
        assert len(found) == len(paths)  # torch's registry names these by position
    else:
        assert found == paths


DIFFERENT: list[object] = [
    0.0,
    -0.0,
    0,
    False,
    None,
    "",
    b"",
    1,
    True,
    1.0,
    1 + 0j,
    "1",
    float("nan"),
    float("inf"),
    complex(0.0, -0.0),
    complex(0.0, 0.0),
    [],
    (),
    {},
    [1],
    (1,),
    [ONE],
    (ONE,),
    {"a": ONE, "b": ONE},
    {"b": ONE, "a": ONE},
    {1: ONE},
    {True: ONE},
    {"1": ONE},
    OrderedDict(a=ONE),
    {"a": ONE},
    Output(a=ONE),
    Output(b=ONE),
    Point(ONE, None),
    Point(ONE, ONE),
    Plain(ONE, None),
    Color.RED,
    Color.BLUE,
    slice(1, 2),
    slice(1, 2.0),
    range(3),
    range(4),
    int,
    float,
    torch.float32,
    torch.float64,
    torch.device("cpu"),
    torch.device("cuda", 0),
    torch.strided,
    torch.channels_last,
    ONE,
]


def test_values_that_differ_have_different_structures() -> None:
    structures = [structure_of(value) for value in DIFFERENT]
    assert len(set(structures)) == len(DIFFERENT)
    for first, structure in enumerate(structures):
        assert [structure == other for other in structures].count(True) == 1, DIFFERENT[first]


def test_equal_values_have_equal_structures() -> None:
    assert structure_of(float("nan")) == structure_of(float("nan"))
    assert structure_of([1, {"a": torch.ones(3)}]) == structure_of([1, {"a": torch.zeros(9)}])


@dataclasses.dataclass
class WithPost:
    value: Any
    doubled: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.doubled = self.value * 2


def test_dataclass_fields_without_init_come_back_without_running_post_init() -> None:
    leaves: list[Tensor] = []
    structure = flatten(WithPost(ONE), leaves)
    assert len(leaves) == 2
    rebuilt = unflatten(structure, iter([torch.tensor(7.0), torch.tensor(1.0)]))
    assert (float(rebuilt.value), float(rebuilt.doubled)) == (7.0, 1.0)


class Opaque:
    pass


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (np.ones(2), "x"),
        ([1, np.ones(2)], "x[1]"),
        ({"a": [Opaque()]}, "x['a'][0]"),
        (types.MappingProxyType({"a": 1}), "x"),
        ((OrderedDict(a=Opaque()),), "x[0]['a']"),
        (Plain(1, {1, 2}), "x.second"),
        ({1.5: ONE}, "x"),
        ({None: ONE}, "x"),
        ({("a", 1): ONE}, "x"),
        (lambda: None, "x"),
        (Point(ONE, Opaque()), "x.y"),
    ],
)
def test_what_has_no_value_identity_is_refused_with_its_path(value: object, path: str) -> None:
    with pytest.raises(TreeError) as caught:
        flatten(value, [], "x")
    assert caught.value.path == path
    assert caught.value.reason


def test_mapping_that_nobody_registered_is_told_apart_from_objects() -> None:
    with pytest.raises(TreeError) as mapping:
        flatten(types.MappingProxyType({}), [], "x")
    with pytest.raises(TreeError) as plain:
        flatten(Opaque(), [], "x")
    assert "mapping" in mapping.value.reason
    assert "mapping" not in plain.value.reason
    assert "Opaque" in plain.value.reason


def test_parameters_are_tensors() -> None:
    leaves: list[Tensor] = []
    parameter = torch.nn.Parameter(ONE)
    assert flatten([parameter], leaves) == ("list", (HOLE,))
    assert leaves[0] is parameter


def test_map_leaves_visits_every_leaf_in_order() -> None:
    structure = structure_of({"a": [ONE, 2], "b": Point(3, ONE)})
    seen: list[tuple[Any, ...]] = []

    def change(leaf: tuple[Any, ...]) -> tuple[Any, ...]:
        seen.append(leaf)
        return (SCALAR_HOLE, int) if leaf[0] == "=" else leaf

    changed = map_leaves(structure, change)
    assert [leaf for _, leaf in leaf_paths(structure)] == seen
    assert hole_paths(changed, "x") == ["x['a'][0]", "x['a'][1]", "x['b'].x", "x['b'].y"]
    assert unflatten(changed, iter("wxyz")) == {"a": ["w", "x"], "b": Point("y", "z")}

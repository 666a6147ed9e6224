from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from aitune_core._scalars import (
    family,
    lift,
    number_places,
    numbers_of,
    scalar_kinds,
    scalar_tensor,
)
from aitune_core._trees import HOLE, SCALAR_HOLE, flatten

X = torch.ones(1)


def call(*values: Any) -> tuple[tuple[Any, ...], list[Tensor]]:
    leaves: list[Tensor] = []
    return tuple(flatten(value, leaves) for value in values), leaves


def test_numbers_are_ints_and_floats_in_order_but_not_booleans() -> None:
    structure, _ = call(X, 1, bool(1), {"a": [2.5, "s", None]}, 1j)
    assert numbers_of(structure) == (1, 2.5)


def test_calls_that_differ_in_numbers_alone_are_one_family() -> None:
    one, other = call(X, 1, [2.0])[0], call(X, 7, [-0.0])[0]
    assert family(one) == family(other)
    assert family(one) != family(call(X, 1, [2])[0])
    assert family(one) != family(call(X, bool(1), [2.0])[0])
    assert family(one) != family(call(X, 1, (2.0,))[0])


def test_lift_makes_chosen_numbers_leaves_in_flat_order() -> None:
    structure, leaves = call(1, X, [2.5, X], 3)
    lifted, mixed = lift(structure, leaves, frozenset({1}))
    assert mixed == [X, 2.5, X]
    assert lifted[0] == ("=", int, 1)
    assert lifted[2] == ("list", ((SCALAR_HOLE, float), HOLE))
    assert number_places(lifted) == frozenset({1})
    assert scalar_kinds(lifted) == {1: float}


def test_lift_of_nothing_changes_nothing() -> None:
    structure, leaves = call(1, X)
    assert lift(structure, leaves, frozenset()) == (structure, leaves)
    assert scalar_kinds(structure) == {}


@pytest.mark.parametrize("value", [0, -5, 2**53 + 1, 2**63 - 1, -(2**63)])
def test_integers_are_held_exactly(value: int) -> None:
    tensor = scalar_tensor(value, torch.device("cpu"))
    assert (tensor.dtype, tensor.shape, tensor.item()) == (torch.int64, (), value)


@pytest.mark.parametrize("value", [0.1, 1e300, 5e-324, float("inf")])
def test_floats_are_held_exactly(value: float) -> None:
    tensor = scalar_tensor(value, torch.device("cpu"))
    assert (tensor.dtype, tensor.shape, tensor.item()) == (torch.float64, (), value)

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from samples import recorded
from torch import Tensor

from aitune_core._extremes import converts_to_indices, extreme_inputs, nudged

X = torch.tensor([1.0, -2.0, 0.0])


def changed(*inputs: Tensor) -> dict[str, tuple[Tensor, ...]]:
    (graph,) = recorded(lambda *xs: xs[0], inputs)
    return {label: values for label, values, _ in extreme_inputs(graph.spec, inputs)}


def test_floats_are_scaled_negated_and_zeroed() -> None:
    extremes = {label: value.tolist() for label, (value,) in changed(X).items()}
    assert extremes == {
        "inputs times 30": [30.0, -60.0, 0.0],
        "inputs times 1000": [1000.0, -2000.0, 0.0],
        "inputs of the other sign": [-1.0, 2.0, -0.0],
        "inputs of zeros": [0.0, 0.0, 0.0],
    }


def test_half_precision_is_not_scaled() -> None:
    assert list(changed(X.half())) == ["inputs of the other sign", "inputs of zeros"]


def test_integers_stay_and_masks_are_all_hidden_and_all_shown() -> None:
    ids, mask = torch.tensor([3, 4]), torch.tensor([True, False])
    extremes = changed(ids, mask)
    assert {label: values[1].tolist() for label, values in extremes.items()} == {
        "booleans all False": [False, False],
        "booleans all True": [True, True],
    }
    assert all(torch.equal(values[0], ids) for values in extremes.values())
    assert changed(ids) == {}


def test_numbers_that_are_inputs_stay() -> None:
    (graph,) = recorded(lambda x, t: x * t, (X, 1.0), (X, 2.0))
    (first, *_) = graph.samples
    assert all(values[1].item() == 1.0 for _, values, _ in extreme_inputs(graph.spec, first))


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x: x.long(), True),
        (lambda x: torch.zeros(3, dtype=torch.int64).copy_(x), True),
        (lambda x: x.round().double(), False),
        (lambda x: x.argmax().int(), False),
        (lambda x: torch.nn.functional.binary_cross_entropy(x.sigmoid(), x.sigmoid()), True),
    ],
)
def test_indices_made_of_values_are_found(
    function: Callable[[Tensor], Tensor], found: bool
) -> None:
    assert converts_to_indices(lambda: function(X)) is found


def test_outputs_that_hang_on_rounding_may_move_and_others_may_not() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * 2, (x * 1e6).sin(), x.argsort()

    (graph,) = recorded(function, (X,))
    calm, wild, order = nudged(graph.spec, [X], lambda inputs: function(*inputs))
    assert calm < 1e-4
    assert wild > 0.1
    assert order == 0.0


def test_scale_is_how_much_larger_values_are() -> None:
    (graph,) = recorded(lambda x: x, (X,))
    assert [scale for *_, scale in extreme_inputs(graph.spec, (X,))] == [30.0, 1000.0, 1.0, 1.0]


def test_where_equal_values_are_sorted_all_outputs_may_change() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.topk(2).indices, x + 1

    (graph,) = recorded(both, (X,))
    ties = torch.tensor([2.0, 7.0, 7.0])
    assert nudged(graph.spec, [ties], lambda inputs: both(*inputs)) == [math.inf, math.inf]
    assert max(nudged(graph.spec, [X], lambda inputs: both(*inputs))) < 1e-4

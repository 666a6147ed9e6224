from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aitune_core._sorting import Sorting, apart, sorting_of

TIES = torch.tensor([2.0, 7.0, 7.0, 1.0])
DISTINCT = torch.tensor([2.0, 7.0, 8.0, 1.0])


@pytest.mark.parametrize(
    ("function", "ties"),
    [
        (lambda x: x.argsort(), True),
        (lambda x: x.sort(descending=True).values, True),
        (lambda x: x[None, :].topk(2, dim=1).indices, True),
        (lambda x: x[:, None].topk(1, 0).indices, True),
        (lambda x: x[:, None].topk(1, 1).indices, False),
        (lambda x: x[:0].sort().values, False),
        (lambda x: x.sum().sort().values, False),
        (lambda x: (x.sort(stable=True), x.flip(0).sort()), True),
        (lambda x: (x.sort().values, DISTINCT.sort().values), True),
    ],
)
def test_equal_values_that_are_sorted_are_seen(
    function: Callable[[Tensor], object], ties: bool
) -> None:
    assert sorting_of(lambda: function(TIES)) is (Sorting.TIES if ties else Sorting.DISTINCT)
    assert sorting_of(lambda: function(DISTINCT)) is Sorting.DISTINCT


@pytest.mark.parametrize(
    "function", [lambda x: x.argmax(), lambda x: torch.sort(x, stable=True), lambda x: x + 1]
)
def test_promised_orders_are_no_sorting(function: Callable[[Tensor], object]) -> None:
    assert sorting_of(lambda: function(TIES)) is Sorting.NONE


def test_values_are_moved_apart_and_integers_and_numbers_stay() -> None:
    ids, number = torch.tensor([3, 3]), torch.tensor(0.5)
    moved, same_ids, same_number = apart([TIES, ids, number])
    assert len(set(moved.tolist())) == TIES.numel()
    assert moved.dtype is TIES.dtype
    torch.testing.assert_close(moved, TIES, rtol=0.011, atol=0)
    assert same_ids is ids
    assert same_number is number
    assert torch.equal(apart([TIES])[0], moved)

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from benchmarks.comparison import WrongResultError, difference, tensors

EXPECTED = [torch.tensor([1.0, -4.0]), torch.tensor([100.0])]


def test_difference_is_of_the_output_that_comes_closest_to_what_is_allowed() -> None:
    got = [torch.tensor([1.0, -4.002]), torch.tensor([100.01])]
    largest, allowed = difference(EXPECTED, got)
    assert largest == pytest.approx(0.002, rel=1e-3)
    assert allowed == pytest.approx(0.004)


@pytest.mark.parametrize(
    "got",
    [
        [torch.tensor([1.0, -4.01]), EXPECTED[1]],
        [torch.tensor([1.0, torch.nan]), EXPECTED[1]],
        [EXPECTED[0].half(), EXPECTED[1]],
        [EXPECTED[0][None], EXPECTED[1]],
        EXPECTED[:1],
    ],
)
def test_wrong_results_are_refused(got: list[torch.Tensor]) -> None:
    with pytest.raises(WrongResultError, match="wrong result"):
        difference(EXPECTED, got)


def test_half_precision_may_differ_by_more() -> None:
    expected = [torch.tensor([1.0, -4.0]).half()]
    largest, allowed = difference(expected, [torch.tensor([1.0, -3.97]).half()])
    assert largest < allowed == pytest.approx(0.04)


def test_tensors_of_nested_results_are_copies() -> None:
    inner = torch.zeros(2)
    found = tensors(OrderedDict(a=(inner, None), b=[torch.ones(1)]))
    inner += 1
    assert [tensor.tolist() for tensor in found] == [[0.0, 0.0], [1.0]]

"""Empty tensors, and results whose size depends on values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aitune_core as ait

Tune = Callable[..., Any]


class Cache(nn.Module):
    """Attention over a cache that begins empty."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(rows, length, 2, 4).transpose(1, 2)

        keys = torch.cat([keys, heads(self.key(x))], 2)
        values = torch.cat([values, heads(self.value(x))], 2)
        weights = torch.softmax(heads(x) @ keys.transpose(-1, -2), -1)
        return weights @ values, keys, values


def _step(rows: int, length: int, past: int) -> tuple[Tensor, ...]:
    return (
        torch.randn(rows, length, 8),
        torch.randn(rows, 2, past, 4),
        torch.randn(rows, 2, past, 4),
    )


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_cache_that_begins_empty(tune: Tune, first: int) -> None:
    calls = [_step(2, 5, 0), _step(2, 1, 5), _step(3, 1, 9)]
    tuned = tune(Cache(), calls[first:] + calls[:first])
    for sizes in ((2, 5, 0), (3, 4, 0), (2, 1, 7), (3, 2, 9), (2, 1, 1)):
        tuned.same(*_step(*sizes))


class Select(nn.Module):
    """Three results of sizes that depend on values."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mask = x > 0.5
        return torch.nonzero(mask), x[mask], mask.sum()


def test_size_of_results_depends_on_values(tune: Tune) -> None:
    tuned = tune(Select(), [torch.rand(2, 6), torch.rand(4, 6)])
    tuned.same(torch.rand(3, 6))
    assert tuned.same(torch.zeros(2, 6))[1].shape == (0,)
    assert tuned.same(torch.ones(4, 6))[0].shape == (24, 2)
    tuned.same(torch.rand(2, 6))


def test_size_of_a_result_depends_on_values_where_sizes_of_inputs_never_change(tune: Tune) -> None:
    class Kept(nn.Module):
        def forward(self, scores: Tensor, boxes: Tensor) -> dict[str, Tensor]:
            keep = scores > 0
            return {
                "boxes": boxes[keep],
                "scores": scores[keep],
                "where": keep.nonzero().squeeze(1),
            }

    def call(*scores: float) -> tuple[Tensor, Tensor]:
        return torch.tensor(scores), torch.randn(4, 4)

    tuned = tune(Kept(), [call(1, -1, 2, -2), call(1, 1, 1, -1)])
    for scores in ((1, 2, 3, 4), (-1, -1, -1, -1), (0, 5, 0, 0)):
        tuned.same(*call(*scores))


def test_unique_values_with_inverse_and_counts(tune: Tune) -> None:
    class Unique(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            values: tuple[Tensor, ...] = torch.unique(x, return_inverse=True, return_counts=True)
            return values

    try:
        tuned = tune(Unique(), [torch.tensor([[3, 1], [1, 2]]), torch.tensor([[5, 5], [5, 4]])])
    except ait.TuningError as error:
        assert all(isinstance(cause, ait.BuildError) for cause in error.exceptions)
        return
    for values in ([[1, 1], [1, 1]], [[4, 3], [2, 1]], [[-7, 0], [0, -7]]):
        assert tuned.same(torch.tensor(values))[1].shape == (2, 2)


class Head(nn.Module):
    """A layer, and functions along its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.mix(x)
        return y.softmax(-1), y.cumsum(-1)


def test_no_rows_are_a_batch_like_any_other(tune: Tune) -> None:
    tuned = tune(Head(), [torch.randn(0, 4), torch.randn(5, 4)])
    for rows in (0, 1, 3, 5, 0):
        assert tuned.same(torch.randn(rows, 4))[0].shape == (rows, 3)


def test_explicit_range_from_zero(tune: Tune) -> None:
    shapes = {"x": {0: ait.BatchDim(0, 8)}}
    tuned = tune(Head(), [torch.randn(3, 4)], dynamic_shapes=shapes)
    for rows in (0, 1, 8):
        tuned.same(torch.randn(rows, 4))


def test_recorded_calls_with_no_rows_alone(tune: Tune) -> None:
    tuned = tune(Head(), [torch.randn(0, 4)])
    tuned.same(torch.randn(0, 4))
    assert tuned.misses(torch.randn(1, 4)).path == "x"


class Total(nn.Module):
    """A sum over rows, of which there may be none."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0)


def test_sum_of_no_rows_is_zero_or_refused(tune: Tune, device: torch.device) -> None:
    calls = [torch.randn(0, 4), torch.randn(5, 4)]
    if device.type == "cuda":
        # ONNX Runtime's kernel cannot; the message names it.
        with pytest.raises(ait.TuningError, match="ReduceSum"):
            tune(Total(), calls)
        return
    tuned = tune(Total(), calls)
    for rows in (0, 1, 5):
        tuned.same(torch.randn(rows, 4))


class Lengths(nn.Module):
    """A value that is read as a size."""

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        longest = int(lengths.max())
        mask = torch.arange(longest)[None] < lengths[:, None]
        return (x[:, :longest] * mask).sum(1), mask


def test_value_read_as_a_size_is_followed_or_refused(tune: Tune) -> None:
    def call(length: int, *lengths: int) -> tuple[Tensor, Tensor]:
        return torch.randn(len(lengths), length), torch.tensor(lengths)

    try:
        tuned = tune(Lengths(), [call(6, 3, 5), call(8, 2, 8, 4)])
    except ait.TuningError as error:
        assert "data-dependent" in str(error)
        assert "wrap a part of the module that does not look at values" in str(error)
        return
    tuned.same(*call(7, 1, 2))
    tuned.same(*call(8, 8, 1))


def test_branch_on_a_value_is_refused(tune: Tune) -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x - 10

    calls = [torch.ones(2, 3), -torch.ones(2, 3)]
    with pytest.raises(ait.TuningError) as caught:
        tune(Branch(), calls)
    assert all(isinstance(error, ait.AituneError) for error in caught.value.exceptions)
    tuned = tune(Branch(), calls, on_failure="eager", wins=False)
    x = torch.full((2, 3), -3.0)
    assert torch.equal(tuned.model(x), tuned.expected(x))


def test_branch_on_a_value_of_which_one_side_was_recorded_is_not_taken_for_granted(
    tune: Tune,
) -> None:
    class Guarded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if bool((x > -100).all()) else x - 10

    try:
        tuned = tune(Guarded(), [torch.randn(2, 3), torch.randn(4, 3)])
    except ait.TuningError:
        return
    # A tuned graph may not answer for the side that nobody recorded.
    x = torch.full((3, 3), -200.0)
    with torch.no_grad():
        assert torch.equal(tuned.model(x), tuned.eager(x))

"""Python numbers, flags and words in calls: never a result for another value."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aitune_core as ait

Tune = Callable[..., Any]


class Scaled(nn.Module):
    """A number in arithmetic."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale + 1 / (1 + scale * scale)


@pytest.fixture(scope="module")
def scaled(tune_once: Tune) -> Any:
    return tune_once(Scaled(), [(torch.randn(2, 3), scale) for scale in (0.5, 2.0, -3.25)])


def test_number_that_changes_is_an_input_of_one_graph(scaled: Any) -> None:
    assert len(scaled.graphs) == 1
    x = torch.randn(2, 3)
    for scale in (0.5, 2.0, 17.125, -1e-3, 1e30, 3.3, 0.0, -0.0, 1.0):
        scaled.same(x, scale)
    scaled.same(x, scale=7.5)
    scaled.same(x)


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
def test_number_that_is_not_finite_gives_what_eager_gives(scaled: Any, scale: float) -> None:
    scaled.same(torch.tensor([[1.0, -1.0, 0.0], [2.0, 0.5, -0.25]]), scale)


def test_number_of_another_type_is_a_miss_that_names_it(scaled: Any) -> None:
    for value in (2, True, "2", None):
        error = scaled.misses(torch.randn(2, 3), value)
        assert error.path == "scale"
        assert repr(value) in str(error)


def test_integer_timestep_in_an_embedding_is_an_input(tune: Tune) -> None:
    class Timestep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(4, 4)

        def forward(self, x: Tensor, step: int) -> Tensor:
            angles = step * torch.tensor([1.0, 0.1, 0.01, 0.001])
            mixed: Tensor = self.mix(x)
            return mixed + torch.sin(angles) - step % 7

    tuned = tune(Timestep(), [(torch.randn(2, 4), step) for step in (999, 500, 1)])
    assert len(tuned.graphs) == 1
    for step in (999, 0, 1, 37, -5):
        tuned.same(torch.randn(2, 4), step)


def test_integer_keeps_results_in_the_dtype_of_the_tensor(tune: Tune) -> None:
    class Shift(nn.Module):
        def forward(self, x: Tensor, by: int) -> Tensor:
            return x * by + by

    tuned = tune(Shift(), [(torch.arange(4, dtype=torch.int32), by) for by in (2, -3)])
    assert tuned.same(torch.arange(4, dtype=torch.int32), 5).dtype is torch.int32
    tuned.same(torch.arange(4, dtype=torch.int32), 2**31 - 1)


def test_floor_division_and_remainder_of_negative_numbers(tune: Tune) -> None:
    class Divide(nn.Module):
        def forward(self, x: Tensor, by: int) -> tuple[Tensor, Tensor]:
            return x // by, x % by

    x = torch.arange(-7, 8)
    tuned = tune(Divide(), [(x, by) for by in (2, -3)])
    for by in (2, -2, 3, -3, 5):
        tuned.same(x, by)


class Repeated(nn.Module):
    """A number that counts the rounds of a loop."""

    def forward(self, x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            x = torch.tanh(x * 1.5)
        return x


def test_number_that_counts_rounds_has_a_graph_per_value(tune: Tune) -> None:
    tuned = tune(Repeated(), [(torch.randn(2, 3), steps) for steps in (1, 3)], wins=False)
    assert tuned.winners.count("onnxruntime") == 2
    assert "steps" in "".join(tuned.report.modules[0].notes)
    tuned.same(torch.randn(2, 3), 1)
    tuned.same(torch.randn(2, 3), 3)
    error = tuned.misses(torch.randn(2, 3), 2)
    assert error.path == "steps"
    assert error.got == "2"


def test_unseen_number_runs_eagerly_with_one_warning_that_names_it(tune: Tune) -> None:
    calls = [(torch.randn(2, 3), steps) for steps in (1, 3)]
    tuned = tune(Repeated(), calls, on_miss="eager", wins=False)
    x = torch.randn(2, 3)
    with pytest.warns(ait.MissWarning, match="'steps' is 2") as caught:
        assert torch.equal(tuned.model(x, 2), tuned.expected(x, 2))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(tuned.model(x, 2), tuned.expected(x, 2))
    assert tuned.eager_calls == 2
    tuned.same(x, 3)


def test_number_that_is_a_size_has_a_graph_per_value(tune: Tune) -> None:
    class First(nn.Module):
        def forward(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
            return x[:, :count].sum(1), torch.zeros(count)

    calls = [(torch.randn(2, 6), count) for count in (2, 5)]
    tuned = tune(First(), calls, wins=False)
    for count in (2, 5):
        tuned.same(torch.randn(2, 6), count)
    # One graph that takes every count would be right as well.
    if tuned.winners.count("onnxruntime") > 1:
        assert tuned.misses(torch.randn(2, 6), 3).path == "count"
    else:
        tuned.same(torch.randn(2, 6), 3)


def test_number_that_is_an_axis_or_a_comparison_is_never_stale(tune: Tune) -> None:
    class Choice(nn.Module):
        def forward(self, x: Tensor, axis: int, limit: float) -> Tensor:
            y = x.sum(axis)
            return y * 2 if limit > 0.5 else y - 1

    calls = [(torch.randn(3, 3), axis, limit) for axis in (0, 1) for limit in (0.25, 0.75)]
    tuned = tune(Choice(), calls, wins=False)
    for _, axis, limit in calls:
        tuned.same(torch.randn(3, 3), axis, limit)
    error = tuned.misses(torch.randn(3, 3), -1, 0.25)
    assert error.path == "axis"


def test_flags_and_words_have_a_graph_per_value(tune: Tune) -> None:
    class Mode(nn.Module):
        def forward(self, x: Tensor, flip: bool = False, mode: str = "sum") -> Tensor:
            y = x.sum(-1) if mode == "sum" else x.amax(-1)
            return -y if flip else y

    def call(rows: int, **kwargs: Any) -> Any:
        return (torch.randn(rows, 4),), kwargs

    forms: list[dict[str, Any]] = [{}, {"flip": True}, {"mode": "max"}]
    tuned = tune(Mode(), [call(rows, **form) for form in forms for rows in (2, 5)])
    assert len(tuned.graphs) == 3
    x = torch.randn(3, 4)
    for form in forms:
        tuned.same(x, **form)
    tuned.same(x, False, "sum")
    error = tuned.misses(x, flip=True, mode="max")
    assert error.path in {"flip", "mode"}
    assert tuned.misses(x, 1).path == "flip"
    assert tuned.misses(x, mode="min").path == "mode"


def test_numbers_in_containers_are_inputs_too(tune: Tune) -> None:
    class Nested(nn.Module):
        def forward(self, options: dict[str, Any], x: Tensor) -> Any:
            low, high = options["range"]
            return x.clamp(low, high) * options["gain"]["value"]

    def call(low: float, high: float, gain: float) -> Any:
        return {"range": (low, high), "gain": {"value": gain}}, torch.randn(2, 5)

    tuned = tune(Nested(), [call(-1.0, 1.0, 2.0), call(-0.5, 0.25, 3.0)])
    assert len(tuned.graphs) == 1
    tuned.same(*call(-0.75, 0.5, -1.5))
    tuned.same(*call(-0.0, 2.0, 0.0))


def test_number_that_never_changed_is_part_of_the_graph(tune: Tune) -> None:
    tuned = tune(Scaled(), [(torch.randn(2, 3), 0.5), (torch.randn(4, 3), 0.5)])
    tuned.same(torch.randn(3, 3), 0.5)
    error = tuned.misses(torch.randn(3, 3), 0.75)
    assert (error.path, error.expected, error.got) == ("scale", "0.5", "0.75")


def test_zero_and_minus_zero_and_true_are_different_numbers(tune: Tune) -> None:
    class Divided(nn.Module):
        def forward(self, x: Tensor, by: Any) -> Any:
            return x / by

    tuned = tune(Divided(), [(torch.ones(2), 0.0)])
    tuned.same(torch.ones(2), 0.0)
    for value in (-0.0, 0, False):
        assert tuned.misses(torch.ones(2), value).got == repr(value)


def test_many_values_of_a_number_that_cannot_be_an_input_stay_eager(tune: Tune) -> None:
    calls = [(torch.randn(2, 3), steps) for steps in range(12)]
    tuned = tune(Repeated(), calls, wins=False, on_miss="eager", on_failure="eager")
    note = "".join(tuned.report.modules[0].notes)
    assert "steps" in note
    x = torch.randn(2, 3)
    for steps in (0, 5, 11, 12):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ait.MissWarning)
            assert torch.equal(tuned.model(x, steps), tuned.expected(x, steps))


def test_number_that_is_a_result_too_is_never_stale(tune: Tune) -> None:
    class Returned(nn.Module):
        def forward(self, x: Tensor, scale: float) -> tuple[Tensor, float]:
            return x * scale, scale

    tuned = tune(Returned(), [(torch.randn(2), 0.5), (torch.randn(2), 2.0)])
    for scale in (2.0, 0.5):
        assert tuned.same(torch.randn(2), scale)[1] == scale
    error = tuned.misses(torch.randn(2), 3.0)
    assert (error.path, error.got) == ("scale", "3.0")

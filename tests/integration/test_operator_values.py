"""Operators whose plain exported form is wrong for values or sizes that nobody recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import aitune_core as ait

Tune = Callable[..., Any]

FLOATS = [[0.0, 1.0, -1.0, 30.0, -30.0, 200.0, -200.0, 1e-6, -2.5]] * 9
INTEGERS = [[-9, -7, -1, 0, 1, 7, 9]] * 3


#: ONNX Runtime 1.31 has no Atan for CUDA, at which such a module is refused.
NO_ATAN = pytest.mark.cpu_only


class Net(nn.Module):
    """A module whose forward is a function of its inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x, y)


_cross_entropy = functools.partial(functional.binary_cross_entropy_with_logits, reduction="none")


def tuned(function: Callable[..., Any], dynamo: bool, *calls: Any) -> Any:
    strategy = ait.OneBackendStrategy(("onnxruntime", {"use_dynamo": dynamo}))
    model = ait.Module(Net(function).eval(), strategy=strategy, on_miss="error")
    ait.tune(model, list(calls), device=calls[0][0].device)
    return model


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, _: functional.logsigmoid(x),
        lambda x, _: nn.LogSigmoid()(x),
        lambda x, y: _cross_entropy(x, (y > 0).float()),
        lambda x, _: x.abs().log1p(),
        lambda x, _: torch.log1p(x.abs() * 1e-9),
        lambda x, _: torch.expm1(x),
        lambda x, _: (x * 1e-5).expm1(),
        lambda x, _: torch.special.expm1(x / 40) * 1e3,
        lambda x, _: (x * 1e-8).expm1_(),
        lambda x, _: (x.abs() * 1e-8).log1p_(),
        torch.logaddexp,
        pytest.param(torch.atan2, marks=NO_ATAN),
        pytest.param(lambda x, y: x.arctan2(y), marks=NO_ATAN),
        lambda x, _: functional.silu(x),
        lambda x, _: functional.softplus(x),
        lambda x, y: x // (y.abs() + 0.7),
        lambda x, y: x % (y.abs() + 0.7),
    ],
)
def test_functions_far_from_what_was_recorded(function: Any, dynamo: bool) -> None:
    model = tuned(function, dynamo, (torch.randn(9, 9), torch.randn(9, 9)))
    x = torch.tensor(FLOATS)
    y = x.T.contiguous()
    torch.testing.assert_close(model(x, y), function(x, y), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x // 3 + 0 * y,
        lambda x, y: x // -4 + 0 * y,
        lambda x, y: x // y,
        torch.floor_divide,
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
        lambda x, y: x.div(y, rounding_mode="trunc"),
        lambda x, y: (x >> 1) + 0 * y,
        lambda x, y: x % y,
        torch.remainder,
        torch.fmod,
        lambda x, y: torch.fmod(x, 4) + 0 * y,
        lambda x, y: torch.fmod(x, -4) + 0 * y,
        lambda x, y: x.div(-4, rounding_mode="trunc") + 0 * y,
    ],
)
def test_division_of_negative_integers(function: Any, dynamo: bool) -> None:
    recorded = torch.arange(1, 22).reshape(3, 7)
    model = tuned(function, dynamo, (recorded, recorded + 1))
    x = torch.tensor(INTEGERS)
    for divisor in (-5, -2, 1, 3):
        y = torch.full((3, 7), divisor)
        assert torch.equal(model(x, y), function(x, y))


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x // y,
        lambda x, y: x // -1 + 0 * y,
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
        lambda x, y: x % y,
        torch.fmod,
    ],
)
def test_lowest_integer_by_minus_one_does_not_end_the_process(function: Any, dynamo: bool) -> None:
    recorded = torch.arange(1, 22).reshape(3, 7)
    model = tuned(function, dynamo, (recorded, recorded + 1))
    x, y = torch.full((3, 7), -(2**63)), torch.full((3, 7), -1)
    assert torch.equal(model(x, y), function(x, y))


@pytest.mark.parametrize("dynamo", [True, False])
def test_nearest_interpolation_to_any_size(dynamo: bool) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return functional.interpolate(x, size=y.shape[-2:], mode="nearest") + y

    model = tuned(
        function,
        dynamo,
        *((torch.rand(1, 2, size, size), torch.rand(1, 2, size * 2, size * 2)) for size in (3, 24)),
        (torch.rand(1, 2, 5, 7), torch.rand(1, 2, 11, 48)),
    )
    for old in range(3, 25, 3):
        for new in range(6, 49):
            x = torch.arange(2.0 * old * old).reshape(1, 2, old, old)
            y = torch.zeros(1, 2, new, new)
            assert torch.equal(model(x, y), function(x, y)), (old, new)


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("size", [8, (12, 8), (10, 6), (3, 3)])
def test_nearest_interpolation_to_a_fixed_size(size: Any, dynamo: bool) -> None:
    def function(x: Tensor, _: Tensor) -> Tensor:
        return functional.interpolate(x, size=size)

    x = torch.rand(2, 3, 4, 4)
    assert torch.equal(tuned(function, dynamo, (x, x))(x, x), function(x, x))


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize(
    "options",
    [
        {"scale_factor": 1.7},
        {"scale_factor": 0.3},
        {"scale_factor": 1.1},
        {"scale_factor": (2.1, 0.3)},
        {"scale_factor": 1.3, "recompute_scale_factor": True},
        {"scale_factor": 3},
    ],
)
def test_nearest_interpolation_by_a_factor(mode: str, options: Any, dynamo: bool) -> None:
    def function(x: Tensor, _: Tensor) -> Tensor:
        return functional.interpolate(x, mode=mode, **options)

    model = tuned(function, dynamo, *((torch.rand(1, 2, size, 9),) * 2 for size in (4, 48)))
    for size in range(4, 49):
        x = torch.arange(2.0 * size * 9).reshape(1, 2, size, 9)
        assert torch.equal(model(x, x), function(x, x)), size


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        lambda scores: scores.sigmoid().topk(5),
        lambda scores: scores.softmax(-1).topk(5),
        lambda scores: scores.sigmoid().sort().values,
        lambda scores: scores.gather(1, scores.sigmoid().topk(3).indices),
    ],
)
def test_order_of_scores_that_become_equal_is_not_compared(function: Any, dynamo: bool) -> None:
    def ordered(x: Tensor, _: Tensor) -> Any:
        return function(x)

    scores = torch.linspace(-3, 3, 60).reshape(3, 20)[:, torch.randperm(20)]
    got = tuned(ordered, dynamo, (scores, scores))(scores * 0.9, scores)
    torch.testing.assert_close(got, function(scores * 0.9))


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_silu_is_right_at_large_values(seed: int, dynamo: bool) -> None:
    torch.manual_seed(seed)
    x = torch.randn(8, 64)
    model = tuned(lambda x, _: functional.silu(x), dynamo, (x, x))
    torch.testing.assert_close(model(x * 30, x), functional.silu(x * 30), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("sizes", [(9,), (4, 9), (4, 48), (3, 4, 9)])
@pytest.mark.parametrize("factor", [1.1, 2.1, 1.04])
def test_nearest_interpolation_of_every_rank(
    mode: str, sizes: tuple[int, ...], factor: float
) -> None:
    def function(x: Tensor, _: Tensor) -> Tensor:
        return functional.interpolate(x, mode=mode, scale_factor=factor)

    x = torch.rand(2, 3, *sizes)
    assert torch.equal(tuned(function, False, (x, x))(x, x), function(x, x))


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic", "area"])
def test_factor_at_which_exports_round_sizes_otherwise_is_refused(mode: str, dynamo: bool) -> None:
    def function(x: Tensor, _: Tensor) -> Tensor:
        return functional.interpolate(x, scale_factor=0.7, mode=mode)

    # 0.7 * 90 is 62.99..., of which 62 remains, while 0.7 * 30 is 21.
    with pytest.raises(ait.TuningError, match=r"interpolation by 0\.7 rounds sizes"):
        tuned(function, dynamo, *((torch.rand(1, 2, size, 9),) * 2 for size in (4, 48)))


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("options", [{"mode": "bilinear"}, {"mode": "bicubic", "scale_factor": 2}])
def test_interpolation_by_a_factor_between_neighbours(options: Any, dynamo: bool) -> None:
    def function(x: Tensor, _: Tensor) -> Tensor:
        return functional.interpolate(x, **{"scale_factor": 1.5, **options})

    model = tuned(function, dynamo, *((torch.rand(1, 2, size, 9),) * 2 for size in (4, 48)))
    for size in range(4, 49):
        x = torch.rand(1, 2, size, 9)
        torch.testing.assert_close(model(x, x), function(x, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x / (y.abs() + 1e-8),
        lambda x, y: x / (y.abs() + 1e-12),
        lambda x, _: x - 1e-9,
        lambda x, _: (x * 1.0000005 - x) * 1e6,
        # On CUDA, torch multiplies by the rounded inverse: an engine is refused for that.
        pytest.param(lambda x, _: (x / 1.000001 - x) * 1e6, marks=pytest.mark.cpu_only),
        lambda x, y: torch.add(x, y, alpha=1e-8),
        lambda x, _: functional.normalize(x, dim=1, eps=1e-9),
        lambda x, _: functional.layer_norm(x, (9,), eps=1e-12) + 1,
    ],
)
def test_constants_close_to_neutral_ones_count(function: Any, dynamo: bool) -> None:
    model = tuned(function, dynamo, (torch.randn(9, 9), torch.randn(9, 9)))
    for x, y in (
        (torch.rand(9, 9) * 1e-8, torch.rand(9, 9) * 1e-8),
        (torch.rand(9, 9), torch.zeros(9, 9)),
        (torch.zeros(9, 9), torch.zeros(9, 9)),
        (torch.full((9, 9), torch.inf), -torch.ones(9, 9)),
    ):
        expected = function(x, y)
        torch.testing.assert_close(model(x, y), expected, rtol=2e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, _: x.clamp(max=2.0),
        lambda x, _: x.clamp(min=-1.0),
        lambda x, _: x.clamp_min(0.5) == torch.inf,
        lambda x, y: torch.minimum(x, y).clamp(0, 3),
        lambda x, _: x.sign(),
        lambda x, _: functional.relu6(x),
        lambda x, _: functional.hardtanh(x, -2, 1),
    ],
)
def test_infinities_and_no_numbers_in_bounds(function: Any, dynamo: bool) -> None:
    model = tuned(function, dynamo, (torch.randn(3, 4), torch.randn(3, 4)))
    x = torch.tensor([[1.0, torch.inf, -torch.inf, torch.nan], [-1, 0, 3, -0.0], [9, -9, 1e38, 1]])
    y = torch.ones(3, 4)
    torch.testing.assert_close(model(x, y), function(x, y), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("tolerances", [{}, {"rtol": 0.0, "atol": 1e-9}, {"equal_nan": True}])
def test_isclose_of_small_numbers(tolerances: Any) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.isclose(x, y, **tolerances)

    model = tuned(function, True, (torch.randn(1, 8), torch.randn(1, 8)))
    x = torch.tensor([[2e-8] * 5 + [torch.inf, torch.inf, torch.nan]])
    y = torch.tensor([[1.9e-8, 1.2e-8, 0, 1e-8, 2e-8, torch.inf, 1, torch.nan]])
    assert torch.equal(model(x, y), function(x, y))

"""Runs on the CPU: right for every layout, shape and thread, and never sharing memory."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aitune_backend_onnxruntime.errors import EngineRunError
from aitune_core.specs import DynamicDim

MakeCase = Callable[..., Any]

BATCH = DynamicDim("batch", 0, 16, 2)
LENGTH = DynamicDim("length", 0, 16, 5)
FOUND = DynamicDim("found", 0, 1000)


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x


class Difference(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x - 2 * y


class NonZero(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.nonzero(), x.float() + 1


class Gather(nn.Module):
    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return x[index]


@pytest.fixture
def twice(case: MakeCase) -> Any:
    return case(
        Twice(),
        torch.randn(2, 5),
        axes=[{0: BATCH, 1: LENGTH}],
        out_axes=[{0: BATCH, 1: LENGTH}],
    ).build()


def layouts(x: Tensor) -> dict[str, Tensor]:
    wide = torch.zeros(x.shape[0] * 2, x.shape[1] * 3)
    wide[::2, ::3] = x
    return {
        "transposed": x.t().contiguous().t(),
        "strided": wide[::2, ::3],
        "offset": torch.cat([torch.zeros(1, x.shape[1]), x])[1:],
        "grad": x.clone().requires_grad_(),
        "expanded": x[:1].expand(4, -1),
        "negated": torch.complex(x, -x).conj().imag,
    }


@pytest.mark.parametrize(
    "layout", ["transposed", "strided", "offset", "grad", "expanded", "negated"]
)
def test_any_layout_gives_the_right_values(twice: Any, layout: str) -> None:
    x = layouts(torch.randn(4, 6))[layout]
    before = x.detach().clone()
    (result,) = twice([x])
    assert torch.equal(result, before * 2)
    assert torch.equal(x, before)
    assert not result.requires_grad


def test_negated_single_element_is_not_read_raw(twice: Any) -> None:
    x = torch.complex(torch.ones(1, 1), torch.full((1, 1), 3.0)).conj().imag
    assert x.is_neg()
    assert torch.equal(twice([x])[0], torch.full((1, 1), -6.0))


def test_two_strided_inputs_keep_their_own_copies(case: MakeCase) -> None:
    engine = case(
        Difference(),
        torch.randn(300, 500),
        torch.randn(300, 500),
    ).build()
    for _ in range(20):
        x, y = torch.randn(500, 300).t(), torch.randn(500, 300).t()
        assert torch.equal(engine([x, y])[0], x - 2 * y)


def test_rank_zero_goes_in_and_out(case: MakeCase) -> None:
    engine = case(Difference(), torch.tensor(5.0), torch.tensor(1.5)).build()
    (result,) = engine([torch.tensor(7.0), torch.tensor(2.0)])
    assert result.shape == ()
    assert result.item() == 3.0


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_empty_tensors_go_in_and_out(twice: Any, shape: tuple[int, int]) -> None:
    (result,) = twice([torch.empty(shape)])
    assert result.shape == shape
    assert result.dtype is torch.float32


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16]
)
def test_dtypes_through_an_exported_module(case: MakeCase, dtype: torch.dtype) -> None:
    class Flip(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flip(0)

    x = torch.tensor([[1, 0, 1], [0, 0, 1]]).to(dtype)
    made = case(Flip(), x, axes=[{0: BATCH}], out_axes=[{0: BATCH}])
    (result,) = made.build()([x])
    assert result.dtype is dtype
    assert torch.equal(result, x.flip(0))


def test_data_dependent_sizes_are_right_call_after_call(case: MakeCase) -> None:
    made = case(
        NonZero(),
        torch.randn(2, 5) > 0,
        axes=[{0: BATCH, 1: LENGTH}],
        out_axes=[{0: FOUND}, {0: BATCH, 1: LENGTH}],
    )
    engine = made.build()
    for seed in range(30):
        x = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed)) > 0.5
        found, plus = engine([x])
        assert torch.equal(found, x.nonzero())
        assert torch.equal(plus, x.float() + 1)
    assert engine._runner._unpredictable == {0}
    found, _ = engine([torch.zeros(3, 4, dtype=torch.bool)])
    assert found.shape == (0, 2)


def test_failing_runs_say_nothing_on_standard_error(
    case: MakeCase, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = case(Gather(), torch.randn(4), torch.tensor([0, 1])).build()
    capfd.readouterr()
    with pytest.raises(EngineRunError, match="invalid index") as caught:
        engine([torch.randn(4), torch.tensor([0, 9])])
    assert isinstance(caught.value.__cause__, Exception)
    assert caught.value.backend_name == "onnxruntime"
    assert capfd.readouterr() == ("", "")
    x = torch.randn(4)
    assert torch.equal(engine([x, torch.tensor([3, 1])])[0], x[[3, 1]])


def test_shapes_that_follow_no_input_are_learned_per_input_shape(case: MakeCase) -> None:
    class Pairs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.repeat(2, 1)

    doubled = DynamicDim("doubled", 0, 1000)
    made = case(Pairs(), torch.randn(2, 5), axes=[{0: BATCH}], out_axes=[{0: doubled}])
    engine = made.build()
    x, y = torch.randn(3, 5), torch.randn(4, 5)
    for value in (x, y, x, y):
        assert torch.equal(engine([value])[0], value.repeat(2, 1))
    assert engine._runner.predicted_shapes([x]) == [(6, 5)]
    assert engine._runner.predicted_shapes([torch.randn(5, 5)]) == [None]
    assert not engine._runner._unpredictable


def test_memory_of_learned_shapes_is_bounded(case: MakeCase) -> None:
    wide = DynamicDim("wide", 1, 2000)
    made = case(
        Twice(), torch.randn(3), axes=[{0: wide}], out_axes=[{0: DynamicDim("other", 0, 9999)}]
    )
    engine = made.build()
    for size in range(1, 600):
        assert engine([torch.ones(size)])[0].shape == (size,)
    assert len(engine._runner._learned) <= 256


def test_results_survive_later_calls_and_the_engine(twice: Any, case: MakeCase) -> None:
    found = case(NonZero(), torch.ones(2, 3, dtype=torch.bool), out_axes=[{0: FOUND}, {}]).build()
    inputs = [torch.full((3, 4), float(number)) for number in range(10)]
    results = [twice([x])[0] for x in inputs]
    mask = torch.tensor([[True, False, True], [False, False, True]])
    kept = found([mask])
    for _ in range(10):
        found([~mask])
    twice.close()
    found.close()
    del twice, found
    gc.collect()
    for x, result in zip(inputs, results, strict=True):
        assert torch.equal(result, x * 2)
    assert torch.equal(kept[0], mask.nonzero())
    assert len({result.data_ptr() for result in results}) == len(results)


def test_results_never_share_memory_with_inputs(case: MakeCase) -> None:
    engine = case(nn.Identity(), torch.randn(2, 3)).build()
    x = torch.randn(2, 3)
    (result,) = engine([x])
    result.zero_()
    assert x.abs().sum() > 0


def test_default_device_of_the_program_does_not_matter(twice: Any) -> None:
    x = torch.randn(3, 3)
    with torch.device("meta"):
        (result,) = twice([x])
    assert torch.equal(result, x * 2)


def test_many_threads_with_mixed_shapes_are_all_right(case: MakeCase) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    made = case(module, torch.randn(2, 8), axes=[{0: BATCH}], out_axes=[{0: BATCH}])
    engine = made.build()
    barrier = threading.Barrier(8)

    def work(seed: int) -> int:
        choice = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        barrier.wait()
        wrong = 0
        for _ in range(200):
            x = torch.randn(choice.randint(1, 16), 8, generator=generator)
            (result,) = engine([x])
            (expected,) = made.eager(x)
            wrong += not torch.allclose(result, expected, atol=1e-5)
        return wrong

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) == 0


def test_many_threads_with_data_dependent_sizes_are_all_right(case: MakeCase) -> None:
    engine = case(
        NonZero(),
        torch.ones(2, 5, dtype=torch.bool),
        axes=[{0: BATCH, 1: LENGTH}],
        out_axes=[{0: FOUND}, {0: BATCH, 1: LENGTH}],
    ).build()

    def work(seed: int) -> int:
        generator = torch.Generator().manual_seed(seed)
        wrong = 0
        for number in range(100):
            x = torch.rand(1 + number % 3, 5, generator=generator) > 0.5
            found, plus = engine([x])
            wrong += not torch.equal(found, x.nonzero()) or not torch.equal(plus, x.float() + 1)
        return wrong

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) == 0

"""Element types of inputs and results: exact, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aitune_core as ait

Tune = Callable[..., Any]


class Layers(nn.Module):
    """Convolution, linear and layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mix, self.norm = nn.Conv2d(3, 4, 3), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv(x)).mean((2, 3))
        normed: Tensor = self.norm(self.mix(y) + y)
        return normed.softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_module_in_another_precision(tune: Tune, dtype: torch.dtype) -> None:
    def call(rows: int) -> Tensor:
        return torch.randn(rows, 3, 6, 6, dtype=dtype)

    try:
        tuned = tune(Layers().to(dtype), [call(2), call(4)])
    except ait.TuningError as error:
        assert str(dtype).removeprefix("torch.") in str(error)
        return
    assert tuned.same(call(3)).dtype is dtype


def test_linear_layers_in_float64(tune: Tune) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    tuned = tune(module, [torch.randn(rows, 4, dtype=torch.float64) for rows in (2, 5)])
    tuned.same(torch.randn(3, 4, dtype=torch.float64))


@pytest.mark.cpu_only
def test_bfloat16_on_the_cpu_is_refused_by_name(tune: Tune) -> None:
    module = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4)).bfloat16()
    calls = [torch.randn(rows, 8, dtype=torch.bfloat16) for rows in (2, 4)]
    with pytest.raises(ait.TuningError) as caught:
        tune(module, calls)
    assert "bfloat16" in str(caught.value)
    (cause,) = caught.value.exceptions
    assert isinstance(cause, ait.BuildError)


class Bytes(nn.Module):
    """Images of bytes and masks, in and out."""

    def forward(self, image: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        x = image.float() / 255 - 0.5
        return (x > 0) & keep, torch.where(keep, image, image + 3), ~keep, (x * keep).sum((1, 2))


def test_bytes_and_booleans_stay_what_they_are(tune: Tune) -> None:
    def call(rows: int) -> tuple[Tensor, Tensor]:
        image = torch.randint(0, 256, (rows, 4, 4), dtype=torch.uint8)
        return image, torch.rand(rows, 4, 4) > 0.5

    tuned = tune(Bytes(), [call(2), call(5)])
    mask, image, inverse, _ = tuned.same(*call(3))
    assert (mask.dtype, image.dtype, inverse.dtype) == (torch.bool, torch.uint8, torch.bool)
    assert set((~mask).int().unique().tolist()) <= {0, 1}
    wrapping = torch.full((2, 4, 4), 255, dtype=torch.uint8)
    tuned.same(wrapping, torch.zeros(2, 4, 4, dtype=torch.bool))


WHOLE = [
    torch.int16,
    torch.int64,
    *(
        pytest.param(rare, marks=pytest.mark.slow)
        for rare in (torch.int8, torch.int32, torch.uint8)
    ),
]


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_integers_of_every_width_in_and_out(tune: Tune, dtype: torch.dtype) -> None:
    class Arithmetic(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return x, x + x, x * 3 - 1, x.sum(1), x.float() / 2, x > 3

    limits = torch.iinfo(dtype)
    calls = [torch.randint(0, 100, (rows, 3)).to(dtype) for rows in (2, 4)]
    tuned = tune(Arithmetic(), calls)
    high = min(limits.max, 2**50)
    tuned.same(torch.tensor([[high, max(limits.min, -(2**50)), 0], [1, 2, 3]], dtype=dtype))


@pytest.mark.xfail(strict=True, reason="ONNX Runtime names no node, so its dtype is not known")
def test_kernel_that_is_missing_is_named_with_its_element_type(tune: Tune) -> None:
    class Clamped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.clamp(1, 5)

    try:
        tuned = tune(Clamped(), [torch.arange(4, dtype=torch.int16)])
    except ait.TuningError as error:
        assert "int16" in str(error)
        return
    tuned.same(torch.tensor([7, -3, 2, 0], dtype=torch.int16))


def test_integers_beyond_32_bits_are_exact(tune: Tune) -> None:
    class Large(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return x + 2**40, x * 3, x.cumsum(1), x // 7, x.gather(1, x % 3), x == 2**53 + 1

    tuned = tune(Large(), [torch.randint(0, 2**33, (rows, 3)) for rows in (2, 4)])
    tuned.same(torch.tensor([[2**53 + 1, 2**31, 2**31 - 1], [2**60 + 1, 0, 2**32 + 1]]))


def _marked(kinds: Iterable[str], rare: frozenset[str]) -> list[Any]:
    return [pytest.param(kind, marks=[pytest.mark.slow] * (kind in rare)) for kind in kinds]


#: Left to the long run: neighbours of kinds that the short one has.
RARE = frozenset(["maximum", "where", "remainder", "index"])
LARGE: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: x.amax(1),
    "maximum": lambda x: torch.maximum(x, x.flip(1)),
    "abs": lambda x: x.abs() + (-x),
    "where": lambda x: torch.where(x > 5, x, x - 1),
    "sort": lambda x: x.sort(1)[0],
    "remainder": lambda x: x % 1000,
    "matmul": lambda x: x @ x.mT,
    "index": lambda x: x[:, [2, 0]].cumsum(1),
    "division towards zero": lambda x: torch.div(x, 3, rounding_mode="trunc"),
    "clamp": lambda x: x.clamp(min=3),
    "sign": lambda x: x.sign(),
    "smallest of all": lambda x: x.min() + x.max(),
    "topk": lambda x: x.topk(2, 1)[0],
}


@pytest.mark.parametrize("kind", _marked(LARGE, RARE))
def test_integers_beyond_32_bits_are_exact_where_small_ones_were_recorded(
    tune: Tune, device: torch.device, kind: str
) -> None:
    if kind == "matmul" and device.type == "cuda":
        pytest.skip("PyTorch has no matmul of integers on CUDA")

    class Function(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return LARGE[kind](x)

    try:
        tuned = tune(Function(), [torch.randint(0, 100, (rows, 3)) for rows in (2, 4)])
    except ait.TuningError:
        return
    tuned.same(torch.tensor([[2**31 + 1, 2**32 + 5, -3], [2**24 + 1, 2**50 + 7, 2]]))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_is_right_or_refused_by_name(tune: Tune, dtype: torch.dtype) -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.mix(x.float()), (x.float() * 2).to(dtype)

    calls = [torch.randn(rows, 8).to(dtype) for rows in (2, 4)]
    try:
        tuned = tune(Narrow(), calls)
    except ait.TuningError as error:
        assert str(dtype).removeprefix("torch.") in str(error)
        return
    x = torch.randn(3, 8).to(dtype)
    first, second = tuned.model(x)
    expected_first, expected_second = tuned.expected(x)
    assert second.dtype is dtype
    assert torch.allclose(first, expected_first, atol=1e-4)
    assert torch.equal(second.float(), expected_second.float())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16], ids=str)
def test_type_that_the_runtime_cannot_take_is_refused_by_name_and_place(
    tune: Tune, dtype: torch.dtype
) -> None:
    class First(nn.Module):
        def forward(self, items: list[Tensor]) -> Tensor:
            return items[0]

    call = ([torch.ones(2, 2), torch.ones(2).to(dtype)],)
    try:
        tuned = tune(First(), [(call, {})])
    except ait.TuningError as error:
        assert str(dtype).removeprefix("torch.") in str(error)
        assert "items[1]" in str(error)
        return
    tuned.same(*call)


class Embed(nn.Module):
    """Ids and floats."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        y: Tensor = self.table(ids)
        return y + x


@pytest.fixture(scope="module")
def embed(tune_once: Tune) -> Any:
    return tune_once(Embed(), [(torch.tensor([0, 3, 8]), torch.randn(3, 4))])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_ids_of_another_type_are_a_miss_with_both_types(embed: Any, dtype: torch.dtype) -> None:
    error = embed.misses(torch.tensor([0, 3, 8]).to(dtype), torch.randn(3, 4))
    name = str(dtype).removeprefix("torch.")
    assert (error.path, error.expected, error.got) == ("ids", "int64", name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_floats_of_another_type_are_a_miss_with_both_types(embed: Any, dtype: torch.dtype) -> None:
    error = embed.misses(torch.tensor([0, 3, 8]), torch.randn(3, 4).to(dtype))
    name = str(dtype).removeprefix("torch.")
    assert (error.path, error.expected, error.got) == ("x", "float32", name)


def test_each_recorded_element_type_has_a_graph(tune: Tune) -> None:
    ids, x = torch.tensor([0, 3, 8]), torch.randn(3, 4)
    tuned = tune(Embed(), [(ids, x), (ids.int(), x), (ids, x.double())])
    assert len(tuned.graphs) == 3
    tuned.same(ids.int(), x)
    assert tuned.same(ids, x.double()).dtype is torch.float64
    error = tuned.misses(ids.int(), x.double())
    assert error.path in {"ids", "x"}


@pytest.mark.parametrize("kind", ["sparse", "subclass", "meta", "number"])
def test_what_is_no_plain_tensor_is_a_miss_that_names_it(embed: Any, kind: str) -> None:
    class Special(Tensor):
        pass

    x: Any = {
        "sparse": lambda: torch.eye(3, 4).to_sparse(),  # type: ignore[no-untyped-call]
        "subclass": lambda: torch.randn(3, 4).as_subclass(Special),
        "meta": lambda: torch.empty(3, 4, device="meta"),
        "number": lambda: 1.5,
    }[kind]()
    with pytest.raises(ait.InputMismatchError) as caught:
        embed.model(torch.tensor([0, 3, 8]), x)
    assert caught.value.path == "x"


def test_rank_zero_and_shape_of_one_are_different(tune: Tune) -> None:
    class Scale(nn.Module):
        def forward(self, x: Tensor, by: Tensor) -> Tensor:
            return x * by

    tuned = tune(Scale(), [(torch.randn(2), torch.tensor(2.0))])
    tuned.same(torch.randn(2), torch.tensor(-3.0))
    error = tuned.misses(torch.randn(2), torch.tensor([2.0]))
    assert (error.path, error.expected, error.got) == ("by", 0, 1)

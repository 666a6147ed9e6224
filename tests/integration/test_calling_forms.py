"""Ways of writing a call: each reaches the right graph with the right tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aitune_core as ait

Tune = Callable[..., Any]


class Weighted(nn.Module):
    """Three tensors of one shape, each used in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(5, 5)

    def forward(self, left: Tensor, middle: Tensor, right: Tensor) -> Tensor:
        mixed: Tensor = self.mix(left)
        return mixed - 2 * middle + 3 * right.sigmoid()


def three(rows: int) -> list[Tensor]:
    return [torch.randn(rows, 5) for _ in range(3)]


def test_order_and_kind_of_arguments_do_not_matter(tune: Tune) -> None:
    a, b, c = three(2)
    tuned = tune(Weighted(), [((a,), {"right": c, "middle": b}), tuple(three(6))])
    assert len(tuned.graphs) == 1
    a, b, c = three(4)
    results = [
        tuned.same(a, b, c),
        tuned.same(a, right=c, middle=b),
        tuned.same(right=c, middle=b, left=a),
        tuned.same(middle=b, left=a, right=c),
    ]
    for result in results[1:]:
        assert torch.equal(result, results[0])
    assert not torch.equal(tuned.same(c, b, a), results[0])


@pytest.mark.parametrize(
    ("args", "kwargs", "path"),
    [
        ((torch.ones(2, 5), torch.ones(2, 5)), {}, "right"),
        ((torch.ones(2, 5),) * 4, {}, None),
        ((torch.ones(2, 5),) * 3, {"right": torch.ones(2, 5)}, "right"),
        ((torch.ones(2, 5),) * 3, {"up": torch.ones(2, 5)}, "up"),
    ],
    ids=["missing", "too many", "twice", "unknown"],
)
def test_call_that_does_not_fit_the_signature_is_a_type_error(
    weighted: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], path: str | None
) -> None:
    with pytest.raises(ait.CallFormError) as caught:
        weighted.model(*args, **kwargs)
    assert isinstance(caught.value, TypeError)
    assert caught.value.path == path


@pytest.fixture(scope="module")
def weighted(tune_once: Tune) -> Any:
    return tune_once(Weighted(), [tuple(three(2)), tuple(three(6))])


class Optional(nn.Module):
    """Two tensors that may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        y: Tensor = self.mix(x)
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        return y if bias is None else y + bias


@pytest.fixture(scope="module")
def optional(tune_once: Tune) -> Any:
    def call(rows: int, **kwargs: Tensor) -> Any:
        return (torch.randn(rows, 6),), kwargs

    calls = [
        call(rows, **given)
        for rows in (2, 5)
        for given in (
            {},
            {"mask": torch.rand(rows, 6) > 0.5},
            {"bias": torch.randn(6)},
        )
    ]
    return tune_once(Optional(), calls)


def test_each_combination_of_optional_tensors_has_a_graph(optional: Any) -> None:
    x, mask, bias = torch.randn(3, 6), torch.rand(3, 6) > 0.5, torch.randn(6)
    assert len(optional.graphs) == 3
    optional.same(x)
    optional.same(x, None, None)
    optional.same(x, mask)
    optional.same(x, mask, bias=None)
    optional.same(x, mask=None, bias=bias)
    optional.same(bias=bias, x=x)


def test_unrecorded_combination_of_optional_tensors_names_the_argument(optional: Any) -> None:
    error = optional.misses(torch.randn(3, 6), torch.rand(3, 6) > 0.5, torch.randn(6))
    assert error.path in {"mask", "bias"}
    assert (error.expected, error.got) == ("None", "a tensor")


class Unused(nn.Module):
    """Only two of four tensors are read."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(5, 3)

    def forward(self, before: Tensor, x: Tensor, between: Tensor, y: Tensor) -> Tensor:
        del before, between
        mixed: Tensor = self.mix(x)
        return mixed + y


def test_tensors_that_nobody_reads_shift_no_other_input(tune: Tune) -> None:
    def call(rows: int, width: int) -> tuple[Tensor, ...]:
        return (
            torch.randn(rows, width),
            torch.randn(rows, 5),
            torch.zeros(2, dtype=torch.int64),
            torch.randn(rows, 3),
        )

    tuned = tune(Unused(), [call(2, 7), call(4, 9)])
    tuned.same(*call(3, 8))


class Like(nn.Module):
    """Of one tensor only the size counts."""

    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        count = like.shape[1]
        return x[:, :count] * 2 + torch.arange(count)


def test_tensor_read_for_its_size_alone_decides_the_size_of_the_result(tune: Tune) -> None:
    def call(rows: int, count: int) -> tuple[Tensor, ...]:
        return torch.randn(rows, 9), torch.zeros(1, count)

    tuned = tune(Like(), [call(2, 4), call(4, 8)])
    for count in (4, 5, 6, 7, 8):
        assert tuned.same(*call(3, count)).shape == (3, count)


class KeywordOnly(nn.Module):
    """Parameters after a star, one of them with a default."""

    def forward(self, x: Tensor, *, other: Tensor, gain: Tensor | None = None) -> Tensor:
        return x * 2 - other if gain is None else (x - other) * gain


def test_keyword_only_parameters(tune: Tune) -> None:
    def call(rows: int) -> Any:
        return (torch.randn(rows, 4),), {"other": torch.randn(rows, 4)}

    tuned = tune(KeywordOnly(), [call(2), call(5)])
    tuned.same(other=torch.randn(3, 4), x=torch.randn(3, 4))
    error = tuned.misses(torch.randn(3, 4), other=torch.randn(3, 4), gain=torch.randn(4))
    assert error.path == "gain"
    assert (error.expected, error.got) == ("None", "a tensor")


class PositionalOnly(nn.Module):
    """Parameters before a slash."""

    def forward(self, x: Tensor, y: Tensor, /, z: Tensor) -> Tensor:
        return x - y * z


def test_positional_only_parameters(tune: Tune) -> None:
    tuned = tune(PositionalOnly(), [tuple(three(2)), tuple(three(4))])
    x, y, z = three(3)
    tuned.same(x, y, z=z)
    with pytest.raises(ait.CallFormError):
        tuned.model(x, y=y, z=z)


class Variadic(nn.Module):
    """Any number of tensors, with and without names."""

    def forward(self, first: Tensor, *rest: Tensor, **named: Tensor) -> dict[str, Tensor]:
        total = first
        for position, tensor in enumerate(rest):
            total = total - (position + 2) * tensor
        return {name: total * tensor for name, tensor in named.items()} | {"total": total}


def test_variadic_tensors_keep_their_places_and_names(tune: Tune) -> None:
    def call(rows: int) -> Any:
        x, y, z = three(rows)
        p, q, _ = three(rows)
        return (x, y, z), {"p": p, "q": q}

    tuned = tune(Variadic(), [call(2), call(5)])
    args, kwargs = call(3)
    tuned.same(*args, **kwargs)
    assert tuned.misses(*args[:2], **kwargs).path == "rest"
    assert tuned.misses(*args, p=kwargs["p"]).path == "named"


def test_order_of_variadic_keywords_is_that_of_the_result(tune: Tune) -> None:
    def call(rows: int, *names: str) -> Any:
        return (torch.randn(rows, 5),), {name: torch.randn(rows, 5) for name in names}

    tuned = tune(Variadic(), [call(2, "p", "q"), call(4, "p", "q"), call(2, "q", "p")])
    assert len(tuned.graphs) == 2
    args, kwargs = call(3, "p", "q")
    assert list(tuned.same(*args, **kwargs)) == ["p", "q", "total"]
    args, kwargs = call(2, "q", "p")
    assert list(tuned.same(*args, **kwargs)) == ["q", "p", "total"]


class Twice(nn.Module):
    """Two tensors, of which one is changed."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.writes = writes

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.writes:
            x.add_(10)
        return x * 2 + y


def test_one_tensor_given_twice(tune: Tune) -> None:
    x, y = torch.randn(2, 3), torch.randn(4, 3)
    tuned = tune(Twice(writes=False), [(x, x), (y, y)])
    tuned.same(torch.randn(3, 3), torch.randn(3, 3))
    z = torch.randn(3, 3)
    tuned.same(z, z)


def test_defaults_of_every_plain_kind(tune: Tune) -> None:
    class Defaults(nn.Module):
        def forward(
            self,
            x: Tensor,
            factor: float = 2.0,
            *,
            negate: bool = True,
            mode: str = "sum",
            dtype: torch.dtype = torch.float64,
            shape: tuple[int, ...] = (-1, 2),
        ) -> Tensor:
            y = (x * factor).reshape(shape).to(dtype)
            y = y.sum(1) if mode == "sum" else y.mean(1)
            return -y if negate else y

    tuned = tune(Defaults(), [torch.randn(2, 4), torch.randn(5, 4)])
    x = torch.randn(3, 4)
    tuned.same(x)
    tuned.same(x, 2.0, negate=True, mode="sum", dtype=torch.float64, shape=(-1, 2))
    assert tuned.misses(x, mode="mean").path == "mode"
    assert tuned.misses(x, negate=False).path == "negate"
    assert tuned.misses(x, dtype=torch.float32).path == "dtype"
    assert tuned.misses(x, shape=(-1, 4)).path == "shape[1]"


def test_no_call_is_an_argument_of_an_unknown_kind(tune: Tune) -> None:
    class Opaque:
        value = 3.0

    class Reader(nn.Module):
        def forward(self, x: Tensor, settings: Any = None) -> Tensor:
            return x if settings is None else x * settings.value

    with pytest.raises(ait.RecordingError) as caught:
        tune(Reader(), [(torch.randn(2, 3), Opaque())])
    assert caught.value.path == "settings"
    assert "Opaque" in str(caught.value)
    tuned = tune(Reader(), [torch.randn(2, 3)])
    error = tuned.misses(torch.randn(2, 3), Opaque())
    assert error.path == "settings"
    assert "Opaque" in str(error)

"""Any call: what a tuned module returns and changes is what eager does, or one of our errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import aitune_core as ait

Tune = Callable[..., Any]
Same = Callable[..., None]

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in _tensors(value)]
    if isinstance(tree, list | tuple):
        return [leaf for value in tree for leaf in _tensors(value)]
    return []


def _numbers(tree: Any) -> float:
    if isinstance(tree, dict):
        return sum((position + 1) * _numbers(value) for position, value in enumerate(tree.values()))
    if isinstance(tree, list | tuple):
        return sum((position + 1) * _numbers(value) for position, value in enumerate(tree))
    return float(tree) if isinstance(tree, int | float) else 0.25


class Anything(nn.Module):
    """Takes trees of any form; every leaf counts in its own way."""

    def forward(self, tree: Any, x: Tensor, *, flag: bool = False) -> Any:
        total = x * _numbers(tree)
        for position, leaf in enumerate(_tensors(tree)):
            total = total + (position + 1.5) * leaf.to(x.dtype).sum(0)
        parts = {"total": -total if flag else total, "tree": tree}
        return parts, [leaf.to(torch.float32) * 2 for leaf in _tensors(tree)]


def equal_or_refused(tuned: Any, same: Same, *args: Any, **kwargs: Any) -> bool:
    """Check one call; returns whether a tuned graph took it."""
    theirs = copy.deepcopy((args, kwargs))
    before = tuned.eager_calls
    try:
        got = tuned.model(*args, **kwargs)
    except ait.AituneError as error:
        assert str(error)
        return False
    assert tuned.eager_calls == before
    with torch.no_grad():
        expected = tuned.eager(*theirs[0], **theirs[1])
    same(expected, got)
    same(theirs, (args, kwargs), "call")
    return True


def _leaf(draw: st.DrawFn, rows: int) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = (rows, draw(st.sampled_from((3, 1))))
    values = torch.randn(shape) * 3
    return values > 0 if dtype is torch.bool else values.abs().to(dtype)


@st.composite
def trees(draw: st.DrawFn, rows: int, depth: int = 2) -> Any:
    """Draw a tree of tensors, numbers, words and None."""
    kind = draw(st.sampled_from(("tensor", "value", "list", "tuple", "dict")))
    if kind == "tensor" or depth == 0:
        return _leaf(draw, rows)
    if kind == "value":
        return draw(st.sampled_from((None, 2, 0.5, True, "word", -1)))
    children = draw(st.lists(trees(rows, depth - 1), max_size=3))
    if kind == "dict":
        return {f"k{position % 2}_{position}": child for position, child in enumerate(children)}
    return tuple(children) if kind == "tuple" else children


FORMS: dict[str, Callable[[int], Any]] = {
    "list": lambda n: [torch.randn(n, 3), (torch.arange(n * 3).view(n, 3), None)],
    "dict": lambda n: {"k0_0": torch.rand(n, 3) > 0.5, "k1_1": [torch.randn(n, 1).double(), 0.5]},
    "mixed": lambda n: ({"a": torch.randn(n, 3).half(), "b": 2}, "word", [torch.randn(n, 3)]),
    "tensor": lambda n: torch.randn(n, 3),
}


@pytest.fixture(scope="module")
def anything(tune_once: Tune) -> Any:
    calls: list[Any] = [
        ((form(n), torch.randn(3)), {"flag": flag})
        for form, flag in zip(FORMS.values(), (False, True, False, False), strict=True)
        for n in (2, 6)
    ]
    return tune_once(Anything(), calls)


@settings(max_examples=150)
@given(data=st.data())
def test_any_tree_gives_what_eager_gives_or_an_error_of_ours(
    anything: Any, same: Same, data: st.DataObject
) -> None:
    rows = data.draw(st.integers(0, 8))
    tree = data.draw(
        st.one_of(trees(rows), st.sampled_from(list(FORMS.values())).map(lambda f: f(rows)))
    )
    equal_or_refused(anything, same, tree, torch.randn(3), flag=data.draw(st.booleans()))


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> Tensor:
    """Draw a float tensor of a shape with any strides."""
    tensor = torch.randn(shape)
    for _ in range(draw(st.integers(1, 3))):
        axis = draw(st.integers(0, len(shape) - 1))
        match draw(st.sampled_from(("step", "expand", "flip", "permute", "slice"))):
            case "step":
                tensor = torch.stack((tensor, tensor + 1), -1)[..., draw(st.integers(0, 1))]
            case "expand" if shape[axis]:
                tensor = tensor.narrow(axis, 0, 1).expand(shape)
            case "flip":
                tensor = tensor.flip(axis)
            case "permute":
                order = draw(st.permutations(range(len(shape))))
                back = [order.index(position) for position in range(len(shape))]
                tensor = tensor.permute(order).contiguous().permute(back)
            case "slice":
                tensor = torch.cat((tensor, tensor), axis).narrow(axis, shape[axis], shape[axis])
    return tensor


class Mixture(nn.Module):
    """Convolution, attention over a length, reductions, a number, a changed input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mix = nn.Conv1d(4, 4, 3, padding=1), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, ...]:
        rows, length, _ = x.shape
        weights = torch.softmax(self.mix(x) @ y.transpose(1, 2) * scale, -1)
        mixed = weights @ y + self.conv(x.transpose(1, 2)).transpose(1, 2)
        y[:, :1] = y[:, :1] * 2 + scale
        return mixed, mixed.reshape(rows * length, 4).sum(0), torch.arange(length) * scale, x


@pytest.fixture(scope="module")
def mixture(tune_once: Tune) -> Any:
    sizes = ((1, 3, 2, 0.5), (4, 9, 7, -1.25), (2, 5, 11, 3.0))
    calls = [(torch.randn(b, t, 4), torch.randn(b, u, 4), s) for b, t, u, s in sizes]
    return tune_once(Mixture(), calls)


@settings(max_examples=150)
@given(data=st.data())
def test_any_sizes_strides_and_numbers_give_what_eager_gives(
    mixture: Any, same: Same, data: st.DataObject
) -> None:
    b, t, u = (data.draw(st.integers(*bounds)) for bounds in ((0, 5), (2, 10), (1, 12)))
    x, y = data.draw(layouts((b, t, 4))), data.draw(layouts((b, u, 4))).contiguous()
    scale = data.draw(st.floats(-50, 50, width=32))
    with torch.no_grad():
        taken = equal_or_refused(mixture, same, x, y, scale)
    assert taken == (1 <= b <= 4 and 3 <= t <= 9 and 2 <= u <= 11)


class Integers(nn.Module):
    """Integer arithmetic that must be exact."""

    def forward(self, x: Tensor, by: int) -> tuple[Tensor, ...]:
        return x // by, x % by, x * by, x == by, x.amax(0), x[x > by]


@pytest.fixture(scope="module")
def integers(tune_once: Tune) -> Any:
    calls = [(torch.randint(-50, 50, (n,)), by) for n, by in ((3, 7), (8, -3))]
    return tune_once(Integers(), calls)


@settings(max_examples=150)
@given(
    values=st.lists(st.integers(-(2**40), 2**40), min_size=3, max_size=8),
    by=st.integers(-(2**20), 2**20).filter(bool),
)
# ONNX Runtime takes the larger of 0 and 2**31 for 0.
@example(values=[0, 0, 0, 2**31], by=1)
def test_integer_arithmetic_is_exact(integers: Any, same: Same, values: list[int], by: int) -> None:
    assert equal_or_refused(integers, same, torch.tensor(values), by)


@pytest.mark.slow
@settings(max_examples=25)
@given(data=st.data())
def test_any_form_can_be_recorded(tune_once: Tune, same: Same, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**16))
    shape = data.draw(trees(2))

    def call(rows: int) -> Any:
        torch.manual_seed(seed)

        def other(tree: Any) -> Any:
            if isinstance(tree, Tensor):
                return tree[torch.arange(rows) % 2] if rows else tree[:0]
            if isinstance(tree, dict):
                return {key: other(value) for key, value in tree.items()}
            return type(tree)(map(other, tree)) if isinstance(tree, list | tuple) else tree

        return other(shape), torch.randn(3)

    try:
        tuned = tune_once(Anything(), [(call(2), {}), (call(5), {})])
    except ait.AituneError as error:
        assert str(error)
        return
    for rows in (2, 3, 4, 5):
        assert equal_or_refused(tuned, same, *call(rows))

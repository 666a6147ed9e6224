"""Plans take a call apart as the general way does, or leave it to that."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from fakes import FakeBackend
from torch import Tensor, nn

import aitune_core as ait
from aitune_core import _dispatch
from aitune_core._plans import Plan, builder, taker
from aitune_core._trees import flatten

X, Y = torch.ones(2), torch.zeros(3)
Pair = namedtuple("Pair", "one two")  # noqa: PYI024

SUPPORTED: list[Any] = [
    X,
    None,
    True,
    3,
    "text",
    [X, Y],
    (X, 1, [Y]),
    {"a": X, "b": Y},
    {"a": [X, {"b": (Y, None)}], "c": 2},
    [],
    {},
]


@pytest.mark.parametrize("value", SUPPORTED, ids=repr)
def test_tensors_come_out_in_flat_order_and_go_in_again(value: Any) -> None:
    expected: list[Tensor] = []
    structure = flatten(value, expected)
    take = taker(structure)
    assert take is not None
    for leaves in (
        Plan([(0, take)]).leaves((value,), {}),
        Plan([("name", take)]).leaves((), {"name": value}),
    ):
        assert leaves is not None
        assert list(map(id, leaves)) == list(map(id, expected))
    again: list[Tensor] = []
    assert flatten(builder(structure)(iter(expected)), again) == structure
    assert list(map(id, again)) == list(map(id, expected))


@pytest.mark.parametrize(
    ("known", "other"),
    [
        (X, None),
        (X, 1.5),
        (X, nn.Buffer(torch.ones(2)).as_subclass(type("Sub", (Tensor,), {}))),
        (None, X),
        (1, True),
        (True, 1),
        (1, 2),
        ("a", "b"),
        ([X], (X,)),
        ([X], [X, X]),
        ([X, 1], [X, 2]),
        ((X, X), Pair(X, X)),
        ({"a": X}, {"b": X}),
        ({"a": X, "b": Y}, {"b": Y, "a": X}),
        ({"a": X}, OrderedDict(a=X)),
        ({"a": X}, {"a": X, "b": X}),
        ({"a": [X]}, {"a": X}),
    ],
    ids=repr,
)
def test_what_differs_is_left_to_the_general_way(known: Any, other: Any) -> None:
    take = taker(flatten(known, []))
    assert take is not None
    assert Plan([(0, take)]).leaves((other,), {}) is None


@pytest.mark.parametrize("value", [1.5, Pair(X, Y), OrderedDict(a=X), {1: X}, torch.float32])
def test_other_kinds_have_no_plan_and_are_built_the_general_way(value: Any) -> None:
    leaves: list[Tensor] = []
    structure = flatten(value, leaves)
    assert taker(structure) is None
    assert type(builder(structure)(iter(leaves))) is type(value)


def test_tensor_that_asks_for_gradients_is_left_only_while_they_are_on() -> None:
    take = taker(flatten(X, []))
    assert take is not None
    plan, x = Plan([(0, take)]), torch.ones(2, requires_grad=True)
    assert plan.leaves((x,), {}) is None
    with torch.no_grad():
        assert plan.leaves((x,), {}) == [x]


class Many(nn.Module):
    def forward(
        self, x: Tensor, /, y: Tensor | None = None, *more: Tensor, scale: int = 1, **named: Tensor
    ) -> Tensor:
        for index, tensor in enumerate([*([] if y is None else [y]), *more, *named.values()]):
            x = x + tensor * (index + 1)
        return x * scale


CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((X,), {}),
    ((X, X), {}),
    ((X,), {"y": X * 2}),
    ((X, X, X * 3, X * 4), {}),
    ((X, X, X * 3), {"scale": 2}),
    ((X,), {"a": X * 5, "b": X * 6}),
    ((X,), {"b": X * 6, "a": X * 5, "scale": 2}),
    ((X,), {"scale": 2, "y": X}),
]


def test_all_ways_of_writing_a_call_give_what_eager_gives() -> None:
    module = Many().eval()
    model = ait.Module(
        module, strategy=ait.OneBackendStrategy(backend=FakeBackend()), on_miss="error"
    )

    def feed(module: nn.Module) -> None:
        for args, kwargs in CALLS:
            module(*args, **kwargs)

    ait.tune(lambda _: feed(model), [0], device="cpu")
    for _ in range(3):
        for number, (args, kwargs) in enumerate(CALLS):
            moved = [tensor + number for tensor in args]
            assert torch.equal(model(*moved, **kwargs), module(*moved, **kwargs))
    dispatcher = model._aitune.dispatcher
    assert dispatcher is not None
    # Where a number is an input, calls are taken apart the general way.
    plain = {(len(args), *kwargs) for args, kwargs in CALLS if "scale" not in kwargs}
    assert plain <= set(dispatcher._plans)


def test_sizes_and_graphs_are_found_by_plans_of_several_threads() -> None:
    module = nn.Identity().eval()
    model = ait.Module(
        module, strategy=ait.OneBackendStrategy(backend=FakeBackend()), on_miss="error"
    )
    ait.tune(model, [torch.ones(size, 4) for size in (1, 50)], device="cpu")
    wrong: list[int] = []

    def work() -> None:
        for size in [*range(1, 51)] * 20:
            x = torch.full((size, 4), float(size))
            if not torch.equal(model(x), x):
                wrong.append(size)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_miss_is_remembered_and_each_error_is_its_own() -> None:
    model = ait.Module(
        nn.Identity().eval(),
        strategy=ait.OneBackendStrategy(backend=FakeBackend()),
        on_miss="error",
    )
    ait.tune(model, [torch.ones(2, 4)], device="cpu")
    errors = []
    for _ in range(3):
        with pytest.raises(ait.InputMismatchError, match="axis 0 has size 3") as caught:
            model(torch.ones(3, 4))
        errors.append(caught.value)
    assert len(set(map(id, errors))) == 3
    assert {error.path for error in errors} == {"input"}
    x = torch.ones(2, 4)
    assert torch.equal(model(x), x)


@pytest.mark.filterwarnings("ignore::aitune_core.MissWarning")
def test_remembered_misses_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch, "_MAX_REMEMBERED", 10)
    model = ait.Module(nn.Identity().eval(), strategy=ait.OneBackendStrategy(backend=FakeBackend()))
    ait.tune(model, [torch.ones(2, 4)], device="cpu")
    for size in range(3, 60):
        assert model(torch.ones(size, 4)).shape == (size, 4)
    dispatcher = model._aitune.dispatcher
    assert dispatcher is not None
    ((_, _, known),) = dispatcher._plans[(1,)]
    assert len(known) <= 10

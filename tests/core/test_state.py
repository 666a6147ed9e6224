from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import recorded
from torch import Tensor, nn

from aitune_core import RecordingError
from aitune_core._state import StateWatch

X = torch.ones(2, 4)


class Holder:
    """An object that is no module and holds a tensor."""

    def __init__(self) -> None:
        self.keys = [torch.zeros(8, 4)]


class Cached(nn.Module):
    """Writes to a tensor that it holds somewhere."""

    def __init__(self, held: Any, where: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.held = held
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        cache = self.where(self.held)
        cache[: len(x)] += x
        return x * 2


@pytest.mark.parametrize(
    ("held", "where", "name"),
    [
        (torch.zeros(8, 4), lambda held: held, "held"),
        ([torch.zeros(8, 4)], lambda held: held[0], "held[0]"),
        ({"k": (torch.zeros(8, 4),)}, lambda held: held["k"][0], "held['k'][0]"),
        (Holder(), lambda held: held.keys[0], "held.keys[0]"),
    ],
)
def test_writing_to_a_tensor_in_an_attribute_is_refused(
    held: Any, where: Callable[[Any], Tensor], name: str
) -> None:
    with pytest.raises(RecordingError, match="changes its own state") as caught:
        recorded(Cached(held, where), (X,))
    assert caught.value.path == name


class Remembers(nn.Module):
    """Keeps something of each call, under a condition."""

    def __init__(self, renew: Callable[[Any, Tensor], bool]) -> None:
        super().__init__()
        self.renew = renew
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.renew(self, x):
            self.kept = torch.arange(len(x)).float()
        assert self.kept is not None
        return x + self.kept[: len(x), None]


def test_tensors_made_once_are_no_state() -> None:
    def longer(module: Any, x: Tensor) -> bool:
        return module.kept is None or len(module.kept) < len(x)

    (graph,) = recorded(Remembers(longer), (X,), (torch.ones(5, 4),), (X,))
    assert len(graph.samples) == 3


def test_a_tensor_that_was_taken_away_counts_as_replaced() -> None:
    module: Any = nn.Linear(2, 2)
    module.kept = [torch.ones(1)]
    watch = StateWatch(module)
    assert watch.replaced() is None
    module.kept.clear()
    assert (watch.written(), watch.replaced()) == (None, "kept[0]")


def test_tensors_of_parts_in_plain_lists_are_watched() -> None:
    module: Any = nn.Linear(2, 2)
    module.parts = [nn.Linear(2, 2)]
    watch = StateWatch(module)
    with torch.no_grad():
        module.parts[0].weight.zero_()
    assert watch.written() == "parts[0].weight"


class Derives(nn.Module):
    """Computes a tensor anew on each call, as hooks of old weight norms do."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make = make
        self.kept = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.make(x)
        return x + self.kept


def test_what_is_computed_anew_from_weights_alone_is_no_state() -> None:
    (graph,) = recorded(Derives(lambda _: torch.ones(4) * 2), (X,))
    assert len(graph.samples) == 1


@pytest.mark.parametrize("x", [X, torch.arange(8).reshape(2, 4), torch.eye(4)[:2].bool()])
def test_what_is_computed_anew_from_inputs_is_state(x: Tensor) -> None:
    with pytest.raises(RecordingError) as caught:
        recorded(Derives(lambda x: x * 1), (x,))
    assert caught.value.path == "kept"

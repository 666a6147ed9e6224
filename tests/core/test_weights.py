from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import batches, engine_of, graphs_of, tuned
from torch import Tensor, nn

from aitune_core import MissWarning
from aitune_core._weights import WeightWatch

PARTS = 40
X = torch.ones(2, 4)


def large() -> Any:
    """Return a module of more parts than are looked at in full at one call."""
    net: Any = nn.Sequential(*(nn.Linear(4, 4) for _ in range(PARTS)))
    net.more = nn.ModuleList()
    net.named = nn.ModuleDict()
    net.weights = nn.ParameterList([nn.Parameter(torch.ones(1))])
    net.by_name = nn.ParameterDict()
    return net.eval()


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 4))


CHANGES: dict[str, Callable[[Any], object]] = {
    "appended to a Sequential": lambda net: net.append(nn.Linear(4, 4)),
    "appended to an empty ModuleList": lambda net: net.more.append(nn.Linear(4, 4)),
    "put into an empty ModuleDict": lambda net: net.named.update({"a": nn.ReLU()}),
    "appended to a ParameterList": lambda net: net.weights.append(parameter()),
    "put into an empty ParameterDict": lambda net: net.by_name.update({"a": parameter()}),
    "a new buffer": lambda net: net[7].register_buffer("scale", torch.ones(1)),
    "a part replaced": lambda net: net.__setitem__(21, nn.Linear(4, 4)),
    "a parameter replaced": lambda net: setattr(net[33], "weight", parameter()),
    "a parameter taken away": lambda net: setattr(net[33], "bias", None),
    "the last part taken away": lambda net: delattr(net, "by_name"),
    "parts swapped": lambda net: net.__setitem__(3, net[4]),
    "a parameter written to": lambda net: nn.init.zeros_(net[33].bias),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_one_change_of_a_large_module_is_noticed_at_the_next_look(change: Any) -> None:
    net = large()
    watch = WeightWatch(net)
    for _ in range(PARTS):
        assert watch.unchanged()
    change(net)
    assert not watch.unchanged()
    assert not watch.all_unchanged()


def test_other_memory_of_one_tensor_is_noticed_in_turn() -> None:
    net = large()
    watch = WeightWatch(net)
    net[33].weight.data = torch.zeros(4, 4)
    assert not all(watch.unchanged() for _ in range(PARTS))


def test_one_parameter_given_for_one_call_of_a_large_module_is_used() -> None:
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(PARTS))).eval()
    model: Any = tuned(net, batches(2))
    other = {f"{PARTS - 1}.bias": torch.full((4,), 100.0)}
    expected = torch.func.functional_call(net, other, (X,))
    with pytest.warns(MissWarning):
        result = torch.func.functional_call(model, other, (X,))
    assert torch.equal(result, expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_traced_part_is_watched() -> None:
    part = torch.jit.trace(nn.Linear(4, 4).eval(), X)  # type: ignore[no-untyped-call]
    model: Any = tuned(nn.Sequential(part, nn.ReLU()).eval(), batches(2))
    runs = engine_of(model).runs
    with torch.no_grad():
        expected = torch.relu(part(X))
        assert torch.equal(model(X), expected)
    assert engine_of(model).runs == runs + 1
    part.weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.warns(MissWarning), torch.no_grad():
        result = model(X)
    assert torch.equal(result, torch.relu(part.bias).expand(2, 4))
    assert graphs_of(model) == ()


class Sparse(nn.Module):
    """Has a buffer without one storage."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.eye(4).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def test_sparse_buffer_is_watched_for_what_it_has() -> None:
    net = Sparse()
    watch = WeightWatch(net)
    assert watch.unchanged()
    net.table = torch.eye(4).to_sparse()
    assert not watch.unchanged()

"""What a call of a tuned module costs besides the engine's own time; on the CPU, in microseconds.

The engine gives results that it has at hand, so that its own time is next to nothing. Run with
``--benchmark-only``; beside each time, ``extra_info`` says how many tensors a call has.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import FakeBackend
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

import aitune_core as ait


class Flat(nn.Module):
    """Takes tensors one by one."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor + 1 for tensor in tensors)


class Nested(nn.Module):
    """Takes dicts of lists of tensors, and gives the same back."""

    def forward(self, inputs: dict[str, dict[str, list[Tensor]]]) -> dict[str, Any]:
        return {
            group: {name: [tensor + 1 for tensor in tensors] for name, tensors in named.items()}
            for group, named in inputs.items()
        }


class Deep(nn.Module):
    """Has many parts with a weight each."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(parts))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def flat_call(count: int) -> tuple[Tensor, ...]:
    return tuple(torch.full((2, 4), float(number)) for number in range(count))


def nested_call(count: int) -> tuple[dict[str, dict[str, list[Tensor]]]]:
    tensors = iter(flat_call(count))
    return (
        {
            f"group{group}": {f"name{name}": [next(tensors) for _ in range(4)] for name in range(4)}
            for group in range(count // 16)
        },
    )


def tuned(module: nn.Module, call: tuple[Any, ...]) -> ait.Module:
    """Return a tuned module whose engine gives the results of one call without computing."""
    model = ait.Module(
        module, strategy=ait.OneBackendStrategy(backend=FakeBackend()), on_miss="error"
    )
    ait.tune(model, [call], device="cpu")
    dispatcher = model._aitune.dispatcher
    assert dispatcher is not None
    graph, inputs = dispatcher.find(call, {})
    results = graph.engine.run(inputs)
    graph._run = lambda inputs: results
    return model


def assert_equal(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, atol=0, rtol=0)


@pytest.mark.parametrize("tensors", [1, 4, 8])
@pytest.mark.benchmark(group="call of a tuned module, engine's time left out")
def test_flat_call(benchmark: BenchmarkFixture, tensors: int) -> None:
    module, call = Flat().eval(), flat_call(tensors)
    model = tuned(module, call)
    benchmark.extra_info["tensors"] = tensors
    with torch.no_grad():
        assert_equal(benchmark(model, *call), module(*call))


@pytest.mark.benchmark(group="call of a tuned module, engine's time left out")
def test_nested_call(benchmark: BenchmarkFixture) -> None:
    module, call = Nested().eval(), nested_call(64)
    model = tuned(module, call)
    benchmark.extra_info["tensors"] = 64
    with torch.no_grad():
        assert_equal(benchmark(model, *call), module(*call))


@pytest.mark.parametrize("parts", [200, 600])
@pytest.mark.benchmark(group="call of a tuned module, engine's time left out")
def test_call_of_a_module_with_many_weights(benchmark: BenchmarkFixture, parts: int) -> None:
    module, call = Deep(parts).eval(), (torch.ones(2, 2),)
    model = tuned(module, call)
    benchmark.extra_info.update(tensors=1, weights=parts)
    with torch.no_grad():
        assert_equal(benchmark(model, *call), module(*call))


@pytest.mark.benchmark(group="call of a tuned module, engine's time left out")
def test_bare_identity(benchmark: BenchmarkFixture) -> None:
    x = torch.ones(2, 4)
    benchmark.extra_info.update(tensors=1, what="nn.Identity, for comparison")
    assert benchmark(nn.Identity().eval(), x) is x


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.benchmark(group="eager call, and a miss that ends in one")
def test_miss(benchmark: BenchmarkFixture, *, wrapped: bool) -> None:
    module, call = nn.Identity().eval(), (torch.ones(2, 4),)
    model = ait.Module(module, strategy=ait.OneBackendStrategy(backend=FakeBackend()))
    ait.tune(model, [call], device="cpu")
    missed = torch.ones(3, 4)
    with pytest.warns(ait.MissWarning):
        model(missed)  # the warning comes once
    benchmark.extra_info.update(tensors=1, what="miss" if wrapped else "eager")
    assert benchmark(model if wrapped else module, missed) is missed

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from samples import recorded
from torch import Tensor, nn

from aitune_core import CheckResult, ValidationError
from aitune_core._reference import Reference
from aitune_core._validation import EngineCheck
from aitune_core.backend import ArtifactWriter, Engine

X = torch.arange(6.0).reshape(3, 2)


class Returns(Engine):
    """Returns what a function makes of the inputs."""

    def __init__(self, graph: Any, function: Any) -> None:
        super().__init__(graph, torch.device("cpu"), "returns")
        self.function = function

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        results: Sequence[Tensor] = self.function(*inputs)
        return results

    def save(self, artifacts: ArtifactWriter) -> None:
        raise NotImplementedError

    def release(self) -> None:
        pass


def check(module: Any, function: Any, *inputs: Tensor) -> CheckResult:
    (graph,) = recorded(module, inputs or (X,))
    reference = Reference(graph.spec, graph.samples, graph.results, graph.reference, "net")
    return EngineCheck(graph.spec, graph.samples, reference)(Returns(graph.spec, function))


def refusal(module: Any, function: Any, *inputs: Tensor) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        check(module, function, *inputs)
    return caught.value


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 1, x * 1


def test_result_that_is_a_view_of_an_input_is_refused() -> None:
    error = refusal(lambda x: x[1:] * 1, lambda x: [x[1:]])
    assert (error.kind, error.output) == ("aliasing", "out")
    assert "shares memory with an input" in str(error)


def test_two_results_in_one_memory_are_refused() -> None:
    error = refusal(two, lambda x: [x.clone()] * 2)
    assert (error.kind, error.output) == ("aliasing", "out[1]")
    assert "another output" in str(error)


def test_columns_of_one_matrix_share_nothing() -> None:
    def columns(x: Tensor) -> Sequence[Tensor]:
        return torch.split(x * 1, 1, dim=1)

    assert check(lambda x: tuple(c.clone() for c in columns(x)), columns).cases > 0


def test_results_that_eager_gives_in_one_memory_may_be_so() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y[0]

    assert check(both, both).cases > 0


def test_expanded_results_pass() -> None:
    def expanded(x: Tensor) -> tuple[Tensor]:
        return ((x * 2)[:1].expand(3, 2),)

    assert check(lambda x: expanded(x)[0], expanded).cases > 0


class Table(nn.Module):
    """Gives its table out, or a copy."""

    table: Tensor

    def __init__(self, *, copy: bool) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2))
        self.copy = copy

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, self.table.clone() if self.copy else self.table


def test_weights_are_handed_out_only_as_eager_does_and_are_never_changed() -> None:
    module = Table(copy=True)
    error = refusal(module, lambda x: (x * 2, module.table))
    assert (error.kind, error.output) == ("aliasing", "out[1]")
    assert "the weights of the module" in str(error)
    module = Table(copy=False)
    assert check(module, module).cases > 0
    assert torch.equal(module.table, torch.ones(2))


def test_writing_to_a_result_must_not_reach_what_the_engine_keeps() -> None:
    kept = torch.ones(2)
    error = refusal(Table(copy=True), lambda x: (x * 2, kept))
    assert (error.kind, error.output) == ("aliasing", "out[1]")
    assert torch.equal(kept, torch.ones(2))


def test_results_of_inference_mode_pass() -> None:
    def inferred(x: Tensor) -> list[Tensor]:
        with torch.inference_mode():
            return [x * 2]

    assert check(lambda x: x * 2, inferred).cases > 0


def test_integers_and_booleans_are_looked_at_too() -> None:
    memory = torch.zeros(3, 2, dtype=torch.bool)

    def overwritten(x: Tensor) -> list[Tensor]:
        return [memory.copy_(x > 1)]

    error = refusal(lambda x: x > 1, overwritten)
    assert (error.kind, error.output) == ("overwritten", "out")

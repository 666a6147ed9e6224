"""What exports take for granted about sizes is found out, by either exporter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from aitune_backend_onnxruntime.guards import export_conditions, trace_conditions
from aitune_backend_onnxruntime.recurrent import recurrent_shapes
from aitune_core.conditions import SizeCondition
from aitune_core.specs import DynamicDim, GraphSpec

from .conftest import Axes, specs

ROWS = DynamicDim(name="rows", min=0, max=100, opt=6)
COLS = DynamicDim(name="cols", min=0, max=100, opt=10)
FREE: Axes = {0: ROWS, 1: COLS}


class Scripted(nn.Module):
    """Runs a function of its input as its forward."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def _graph(*inputs: Tensor, axes: list[Axes]) -> GraphSpec:
    return GraphSpec(
        name="graph",
        inputs=specs("t", inputs, axes),
        outputs=(),
        call_structure=(("*",),) * len(inputs),
        result_structure=(),
    )


def _exported(module: nn.Module, inputs: tuple[Tensor, ...], graph: GraphSpec) -> set[str]:
    hint = torch.export.Dim.AUTO
    shapes = tuple(dict.fromkeys(spec.dynamic_axes, hint) for spec in graph.inputs)
    program = torch.export.export(
        module, inputs, dynamic_shapes=(shapes,), prefer_deferred_runtime_asserts_over_guards=True
    )
    return {one.text for one in export_conditions(program, graph)}


def _traced(module: nn.Module, inputs: tuple[Tensor, ...], graph: GraphSpec) -> set[str]:
    return {one.text for one in trace_conditions(module, inputs, graph)}


@pytest.mark.parametrize("found", [_exported, _traced])
@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: x * 2 if x.shape[0] % 2 == 0 else x, "rows % 2 == 0"),
        (lambda x: x * 2 if x.shape[0] > 40 else x, "rows <= 40"),
        (lambda x: x * 2 if x.shape[0] == 77 else x, "rows != 77"),
        (lambda x: x * 2 if x.shape[0] * 3 > x.shape[1] else x, "3 * rows > cols"),
        (
            lambda x: nn.functional.pad(x, (0, -x.shape[1] % 4)) if x.shape[1] % 4 else x,
            "cols % 4 != 0",
        ),
    ],
)
def test_branch_on_a_size_becomes_a_condition(
    found: Callable[..., set[str]], function: Callable[..., Tensor], text: str
) -> None:
    x = torch.randn(6, 10)
    graph = _graph(x, axes=[FREE])
    texts = found(Scripted(function), (x,), graph)
    conditions = [SizeCondition(one) for one in texts]
    for rows in range(2, 100):
        for cols in range(2, 100, 7):
            sizes = {"rows": rows, "cols": cols}
            if all(one.holds(sizes) for one in conditions):
                assert SizeCondition(text).holds(sizes)
    for taken in ({"rows": 6, "cols": 10}, {"rows": 8, "cols": 13}):
        assert all(one.holds(taken) for one in conditions)


@pytest.mark.parametrize("found", [_exported, _traced])
def test_sizes_that_must_be_equal_and_numbers_that_were_frozen(
    found: Callable[..., set[str]],
) -> None:
    x, y = torch.randn(6, 10), torch.randn(6, 10)
    other = DynamicDim(name="other", min=1, max=100, opt=6)
    graph = _graph(x, y, axes=[FREE, {0: other}])
    texts = found(Scripted(lambda x, y: (x + y) * int(x.shape[1])), (x, y), graph)
    assert "cols == 10" in texts
    assert not texts.isdisjoint({"other == rows", "rows == other"})


@pytest.mark.parametrize("found", [_exported, _traced])
def test_code_without_branches_takes_every_size_above_one(found: Callable[..., set[str]]) -> None:
    x = torch.randn(6, 10)
    conditions = map(
        SizeCondition,
        found(Scripted(lambda x: x.flatten().relu() * 2), (x,), _graph(x, axes=[FREE])),
    )
    for condition in conditions:
        assert all(condition.holds({"rows": n, "cols": m}) for n in (2, 9) for m in (2, 100))


def test_trace_run_leaves_the_module_as_it_was() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(10, 3)
            self.count = nn.Buffer(torch.zeros(()))
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            self.last = self.linear(x)
            return self.last

    x = torch.randn(6, 10)
    module = Remembers()
    assert trace_conditions(module, (x,), _graph(x, axes=[{0: ROWS}])) is not None
    assert module.last is None
    assert module.count == 0
    assert all(type(one) is nn.Parameter for one in module.parameters())


def test_trace_run_refuses_code_that_looks_at_values() -> None:
    x = torch.randn(6, 10)
    module = Scripted(lambda x: x * 2 if x.sum() > 0 else x)
    with pytest.raises(Exception, match="data-dependent"):
        trace_conditions(module, (x,), _graph(x, axes=[FREE]))


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("directions", [1, 2])
def test_steps_of_recurrent_layers_are_no_branches(
    layer: Callable[..., nn.Module], directions: int
) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer(10, 4, 2, batch_first=True, bidirectional=directions == 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)[0]
            assert y.shape == (*x.shape[:2], 4 * directions)
            return y * 2 if x.shape[1] > 7 else y

    x = torch.randn(6, 9, 10)
    texts = _traced(Recurrent(), (x,), _graph(x, axes=[FREE]))
    assert "cols > 7" in texts
    for one in map(SizeCondition, texts):
        assert all(one.holds({"rows": rows, "cols": cols}) for rows in (2, 7) for cols in (8, 50))


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_layers_of_other_threads_keep_their_values(
    layer: Callable[..., nn.Module],
) -> None:
    other = layer(10, 4)
    x = torch.randn(6, 9, 10)
    with torch.no_grad():
        expected = other(x)[0]
        with recurrent_shapes():
            got = other(x)[0]
    assert torch.equal(got, expected)

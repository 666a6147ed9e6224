"""Modules and short forms that many tests use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fake_plugin import empty_registry
from fakes import FakeBackend, FakeEngine
from torch import Tensor, nn

from aitune_core import Backend, Module, OneBackendStrategy, Outcome, tune
from aitune_core._calls import CallForm
from aitune_core._dispatch import TunedGraph
from aitune_core._graphs import DynamicShapes, RecordedGraph, recorded_graphs
from aitune_core._module import state_of
from aitune_core._recording import ModuleRecording
from aitune_core._trees import HOLE
from aitune_core._trial import GraphTrial
from aitune_core.conditions import SizeCondition
from aitune_core.specs import DynamicDim, GraphSpec, TensorSpec


class Affine(nn.Module):
    """``scale * x + shift``, with one parameter each."""

    def __init__(self, scale: float = 2.0, shift: float = 3.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))
        self.shift = nn.Parameter(torch.tensor(shift))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.shift


class Function(nn.Module):
    """A module whose ``forward`` is a given function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def mlp(*, dropout: float = 0.0) -> nn.Sequential:
    """Return a small network with four parameters, in eval mode."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3)).eval()


def batches(*sizes: int, width: int = 4) -> list[Tensor]:
    """Return one random batch per size."""
    return [torch.randn(size, width) for size in sizes]


def tuned(
    module: nn.Module,
    input_data: object,
    *,
    backend: Any = None,
    batch_sizes: Any = None,
    name: str | None = None,
    **options: Any,
) -> Module:
    """Return a module tuned with the fake backend, whatever its speed."""
    strategy = OneBackendStrategy(backend if backend is not None else FakeBackend())
    model = Module(module, name, strategy=strategy, **options)
    tune(model, input_data, device="cpu", batch_sizes=batch_sizes, registry=empty_registry())
    return model


def graphs_of(model: nn.Module) -> tuple[TunedGraph, ...]:
    """Return the tuned graphs of a module; none where it is not tuned."""
    assert isinstance(model, Module)
    dispatcher = state_of(model).dispatcher
    return () if dispatcher is None else dispatcher.graphs


def engine_of(model: nn.Module, position: int = 0) -> FakeEngine:
    """Return an engine of a tuned module."""
    engine = graphs_of(model)[position].engine
    assert isinstance(engine, FakeEngine)
    return engine


def recorded(
    module: nn.Module | Callable[..., Any],
    *calls: Any,
    dynamic_shapes: DynamicShapes | None = None,
) -> list[RecordedGraph]:
    """Return the graphs of calls given as ``args`` tuples or ``(args, kwargs)`` pairs."""
    return recorded_graphs(recording_of(module, *calls), dynamic_shapes)


def evaluated(
    backend: Backend,
    module: nn.Module | Callable[..., Any],
    *calls: Any,
    dynamic_shapes: DynamicShapes | None = None,
) -> Outcome:
    """Return what becomes of a candidate for the only graph of calls, on the CPU."""
    (graph,) = recorded(module, *calls, dynamic_shapes=dynamic_shapes)
    trial = GraphTrial(
        "net",
        graph,
        (),
        torch.device("cpu"),
        started=lambda _: None,
        finished=lambda _: None,
    )
    return trial.evaluate(backend)


def recording_of(module: nn.Module | Callable[..., Any], *calls: Any) -> ModuleRecording:
    """Return the recording of calls."""
    module = module if isinstance(module, nn.Module) else Function(module)
    recording = ModuleRecording("net", module.eval(), CallForm.of(module.forward))
    with torch.no_grad():
        for call in calls:
            pair = len(call) == 2 and isinstance(call[0], tuple) and isinstance(call[1], dict)
            args, kwargs = call if pair else (call, {})
            recording.record(args, kwargs)
    return recording


def with_dims(*dims: DynamicDim, conditions: tuple[str, ...] = ()) -> GraphSpec:
    """Return a graph whose only input has these axes."""
    spec = TensorSpec(name="input_0", path="x", dtype=torch.float32, shape=dims)
    return GraphSpec(
        name="graph_0",
        inputs=(spec,),
        outputs=(),
        call_structure=(HOLE,),
        result_structure=HOLE,
        conditions=tuple(map(SizeCondition, conditions)),
    )

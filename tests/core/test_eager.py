from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_plugin import empty_registry
from samples import Affine, batches, evaluated, graphs_of, mlp, recorded
from torch import Tensor, nn

import aitune_core as ait
from aitune_core import CheckpointError, ConfigError, EngineClosedError
from aitune_core._eager import EagerBackend, EagerEngine


def engine(module: Any, *calls: Any) -> EagerEngine:
    outcome = evaluated(EagerBackend(), module, *calls)
    assert outcome.error is None
    assert isinstance(outcome.engine, EagerEngine)
    return outcome.engine


class Shared(nn.Module):
    """Returns its input, its state, and one result twice."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3.0))
        self.plain = torch.arange(4.0)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        doubled = 2 * x
        return x, self.table[1:], self.plain, doubled, doubled.T


def test_named_eager_serves_what_the_module_gives() -> None:
    net = mlp()
    model = ait.Module(net, strategy=ait.OneBackendStrategy("eager"))
    report = ait.tune(model, batches(2, 4), device="cpu", registry=empty_registry())
    assert report.modules[0].graphs[0].winner == "eager"
    x = torch.randn(3, 4)
    assert torch.equal(model(x), net(x).detach())
    assert isinstance(graphs_of(model)[0].engine, EagerEngine)


def test_results_are_the_callers_own() -> None:
    module = Shared()
    built = engine(module, (torch.ones(2, 2),))
    x = torch.full((2, 2), 3.0)
    expected = [tensor.clone() for tensor in module(x)]
    for result in built((x,)):
        result.fill_(-1.0)
    again = built((x,))
    assert all(torch.equal(one, other) for one, other in zip(again, expected, strict=True))
    again[3].zero_()
    assert torch.equal(again[4], expected[4])
    assert torch.equal(x, torch.full((2, 2), 3.0))


def test_inputs_that_the_module_writes_to_stay_as_they_are() -> None:
    built = engine(lambda x: x.add_(1), (torch.zeros(2),))
    x = torch.zeros(2)
    result, changed = built((x,))
    assert torch.equal(x, torch.zeros(2))
    assert torch.equal(result, torch.ones(2))
    assert torch.equal(changed, torch.ones(2))


def test_modes_of_the_caller_change_nothing() -> None:
    built = engine(mlp(), *((x,) for x in batches(2, 4)))
    x = torch.randn(3, 4, requires_grad=True)
    (plain,) = built((x.detach(),))
    with torch.enable_grad(), torch.autocast("cpu"):
        (result,) = built((x,))
    assert not result.requires_grad
    assert torch.equal(result, plain)


def test_threads_get_their_own_results() -> None:
    built = engine(mlp(), *((x,) for x in batches(1, 8)))
    wrong: list[int] = []

    def call(rows: int) -> None:
        x = torch.full((rows, 4), float(rows))
        (expected,) = built((x,))
        wrong.extend(rows for _ in range(50) if not torch.equal(built((x,))[0], expected))

    threads = [threading.Thread(target=call, args=(rows,)) for rows in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_closed_engine_refuses_and_lets_the_module_go() -> None:
    net = Affine()
    weight = weakref.ref(net.scale)
    built = engine(net, (torch.ones(2, 4),))
    del net
    built.close()
    gc.collect()
    assert weight() is None
    with pytest.raises(EngineClosedError) as caught:
        built((torch.ones(2, 4),))
    assert (caught.value.backend_name, caught.value.operation) == ("eager", "run")


def test_eager_is_python_code_which_no_checkpoint_holds(tmp_path: Path) -> None:
    model = ait.Module(mlp(), strategy=ait.OneBackendStrategy("eager"))
    ait.tune(model, batches(2), device="cpu", registry=empty_registry())
    with pytest.raises(CheckpointError, match="Python code"):
        ait.save(model, tmp_path / "model.ait", registry=empty_registry())
    assert not (tmp_path / "model.ait").exists()
    (graph,) = recorded(mlp(), (torch.ones(2, 4),))
    with pytest.raises(CheckpointError, match="tune the module again"):
        EagerBackend().load(None, graph.spec, torch.device("cpu"))  # type: ignore[arg-type]


def test_eager_has_no_options() -> None:
    with pytest.raises(ConfigError) as caught:
        empty_registry().backend("eager", mode="fast")
    assert caught.value.field == "mode"

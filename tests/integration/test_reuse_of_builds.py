"""Tunings of one module one after the other: what was exported once is not exported again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aitune_backend_onnxruntime.backend as ort_backend
import aitune_core as ait
from aitune_core._module import state_of

Tune = Callable[..., Any]

ROWS = [torch.linspace(-1, 1, 8 * rows).reshape(rows, 8) for rows in (2, 5)]


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the exports that are made, in order."""
    made: list[object] = []
    export = vars(ort_backend)["export"]

    def noted(plan: Any, *args: Any) -> Any:
        made.append(plan)
        return export(plan, *args)

    monkeypatch.setattr(ort_backend, "export", noted)
    return made


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))


def candidates(tuned: Any) -> list[Any]:
    return [candidate for graph in tuned.graphs for candidate in graph.candidates]


def test_second_tuning_exports_nothing(tune: Tune, exports: list[object]) -> None:
    first = tune(net(), ROWS)
    count = len(exports)
    assert count > 0
    second = tune(net(), ROWS)
    assert len(exports) == count
    assert [candidate.reused for candidate in candidates(second)] == [True]
    assert candidates(second)[0].seconds.load > 0
    assert second.graphs[0].inputs == first.graphs[0].inputs
    for rows in (2, 3, 5):
        second.same(torch.randn(rows, 8))


@pytest.mark.parametrize("options", [{"precision": "fp16"}, {"use_dynamo": False}])
def test_engines_of_other_options_come_back_with_them(
    tune: Tune, exports: list[object], options: dict[str, Any]
) -> None:
    tune(net(), ROWS)
    types = []
    for reused in (False, True):
        count = len(exports)
        tuned = tune(net(), ROWS, options=options)
        assert [candidate.reused for candidate in candidates(tuned)] == [reused]
        assert (len(exports) > count) is not reused
        dispatcher = state_of(tuned.model).dispatcher
        assert dispatcher is not None
        types.append(dispatcher.graphs[0].engine.compute_dtype)
    assert types == ([torch.float16] * 2 if "precision" in options else [None] * 2)


def test_changed_weight_is_exported_anew(tune: Tune, exports: list[object]) -> None:
    tune(net(), ROWS)
    count = len(exports)
    module = net()
    with torch.no_grad():
        module[2].bias[0] += 1e-3  # type: ignore[index]
    tuned = tune(module, ROWS)
    assert len(exports) > count
    tuned.same(torch.randn(4, 8))


class Rare(nn.Module):
    """Does something else at a size that no recorded call has."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1) * 3 if x.shape[1] == 77 else x.sum(1)


def test_sizes_that_an_engine_takes_come_back_with_it(tune: Tune) -> None:
    calls = [torch.ones(2, 4), torch.ones(3, 300)]
    for reused in (False, True):
        tuned = tune(Rare(), calls)
        assert [candidate.reused for candidate in candidates(tuned)] == [reused]
        assert tuned.graphs[0].conditions == ("x_1 != 77",)
        tuned.same(torch.randn(2, 76))
        tuned.misses(torch.randn(2, 77))


def test_interrupted_tuning_goes_on_after_the_finished_graph(
    tune: Tune, exports: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [ROWS[0], ROWS[0][None]]
    build = ort_backend.ONNXRuntimeBackend.build
    built: list[str] = []

    def interrupted(self: Any, request: ait.BuildRequest) -> Any:
        if built:
            raise KeyboardInterrupt
        built.append(request.graph.name)
        return build(self, request)

    with monkeypatch.context() as patch:
        patch.setattr(ort_backend.ONNXRuntimeBackend, "build", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tune(net(), calls)
    tuned = tune(net(), calls)
    assert [candidate.reused for candidate in candidates(tuned)] == [True, False]
    assert built == ["graph_0"]


def test_restored_engine_can_be_saved(tune: Tune, tmp_path: Any, device: torch.device) -> None:
    tune(net(), ROWS)
    tuned = tune(net(), ROWS)
    assert candidates(tuned)[0].reused
    ait.save(tuned.model, tmp_path / "net.ait")
    loaded = ait.load(tmp_path / "net.ait", device=device)
    x = ROWS[1].to(device)
    assert torch.equal(loaded(x), tuned.model(x))

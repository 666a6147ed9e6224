"""Exports leave modules of other threads as they are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.onnx._internal.exporter import _capture_strategies

import aitune_core as ait
from aitune_backend_onnxruntime.patching import (
    bytecode_followed_unless,
    confined_to_this_thread,
    replaced_here,
)


def elsewhere(function: Callable[[], object]) -> object:
    """Call a function in another thread."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_replaced_for_one_thread() -> None:
    owner = SimpleNamespace(name=lambda: "real")
    with replaced_here(owner, "name", lambda: "own"):
        assert owner.name() == "own"
        assert elsewhere(lambda: owner.name()) == "real"
    assert owner.name() == "real"


def test_compiling_is_said_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with confined_to_this_thread():
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
        monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
        assert torch.compiler.is_compiling()
        assert torch.compiler.is_exporting()
        assert elsewhere(lambda: torch.compiler.is_compiling()) is False
        assert elsewhere(lambda: torch.compiler.is_exporting()) is False


def _padded_encoder() -> Callable[[], Tensor]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.rand(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    return lambda: encoder(x, src_key_padding_mask=padding)


def _scripted() -> Callable[[], Tensor]:
    script: Any = torch.jit.script
    module = script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval())
    x = torch.rand(2, 4)
    return lambda: module(x)


def _traced() -> Callable[[], Tensor]:
    trace: Any = torch.jit.trace
    module = trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.rand(2, 4))
    x = torch.rand(2, 4)
    return lambda: module(x)


def _gru() -> Callable[[], Tensor]:
    module, x = nn.GRU(4, 8).eval(), torch.rand(2, 5, 4)
    return lambda: module(x)[0]


def _lstm() -> Callable[[], Tensor]:
    module, x = nn.LSTM(4, 8).eval(), torch.rand(2, 5, 4)
    return lambda: module(x)[0]


class Branch(nn.Module):
    """Takes a path of its own at one size, so that its sizes are followed, too."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 3 if x.shape[0] == 77 else x * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("make", [_padded_encoder, _scripted, _traced, _gru, _lstm])
@torch.no_grad()
def test_modules_of_other_threads_work_during_an_export(
    make: Callable[[], Callable[[], Tensor]], dynamo: bool
) -> None:
    call = make()
    expected = call()
    problems: list[object] = []
    done = threading.Event()
    rounds = 0

    @torch.no_grad()
    def work() -> None:
        nonlocal rounds
        while not done.is_set():
            try:
                got = call()
                # PyTorch's exporter switches oneDNN off for the process, which rounds otherwise.
                if not torch.allclose(got, expected, rtol=0, atol=1e-6):
                    problems.append(got)
            except Exception as error:  # noqa: BLE001 - shown by the test's own thread
                problems.append(error)
            rounds += 1

    worker = threading.Thread(target=work)
    worker.start()
    try:
        model = ait.Module(
            Branch().eval(),
            strategy=ait.OneBackendStrategy(("onnxruntime", {"use_dynamo": dynamo})),
            dynamic_shapes={"x": {0: ait.DynamicDim("n", 1, 70)}},
        )
        ait.tune(model, torch.rand(20, 4), device="cpu")
    finally:
        done.set()
        worker.join()
    assert problems == []
    assert rounds > 0


def test_bytecode_is_followed_unless_an_operator_was_refused() -> None:
    def followed() -> bool:
        strategy = _capture_strategies.TorchExportStrictStrategy()
        return strategy(nn.Linear(2, 3), (torch.ones(1, 2),), None, None).success

    with bytecode_followed_unless(lambda: True):
        assert not followed()
        assert elsewhere(followed)
    with bytecode_followed_unless(lambda: False):
        assert followed()
    assert followed()

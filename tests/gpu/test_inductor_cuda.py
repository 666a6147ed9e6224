"""Compiled engines on a device: every mode, threads on their own streams, weights that left."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import aitune_core as ait

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).eval()


def tuned(mode: str, net: nn.Module, after_tune: str = "keep") -> ait.Module:
    strategy = ait.OneBackendStrategy(("inductor", {"mode": mode}))
    shapes = {"input": {0: ait.BatchDim(1, 12)}}
    model = ait.Module(
        net,
        "net",
        strategy=strategy,
        dynamic_shapes=shapes,
        on_miss="error",
        after_tune=after_tune,  # type: ignore[arg-type]
    )
    calls = [torch.randn(2, 16), torch.randn(5, 16)]
    ait.tune(model, calls, device="cuda", registry=ait.PluginRegistry([]))
    return model


@pytest.mark.parametrize(
    "mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
)
def test_threads_on_their_own_streams_get_their_own_results(mode: str) -> None:
    model = tuned(mode, network())
    eager = network().cuda()
    wrong: list[str] = []

    def call(position: int) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.no_grad(), torch.cuda.stream(stream):
            kept = []
            for turn in range(60):
                x = torch.randn(1 + (position + turn) % 12, 16, device="cuda")
                kept.append((model(x), eager(x)))
            for result, expected in kept:
                if not torch.allclose(result, expected, atol=1e-3):
                    wrong.append(f"thread {position}, {tuple(result.shape)}")

    threads = [threading.Thread(target=call, args=(position,)) for position in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("after_tune", ["offload", "release"])
def test_engine_keeps_weights_that_left_the_device(mode: str, after_tune: str) -> None:
    model = tuned(mode, network(), after_tune)
    x = torch.randn(3, 16, device="cuda")
    with torch.no_grad():
        expected = network().cuda()(x)
    torch.testing.assert_close(model(x), expected, atol=1e-3, rtol=1e-3)


def test_users_own_cuda_graphs_stay_valid() -> None:
    own = network().cuda()
    users = torch.compile(own, mode="reduce-overhead")
    x = torch.randn(4, 16, device="cuda")
    model = tuned("reduce-overhead", network())
    with torch.no_grad():
        expected = own(x)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            result = users(x)
            model(x)
            torch.testing.assert_close(result, expected, atol=1e-3, rtol=1e-3)

"""What an engine of ONNX Runtime costs besides the bare run of its session; on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from onnxruntime.capi import _pybind_state as ort_c
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

import aitune_core as ait


class Sums(nn.Module):
    """Takes several tensors and returns as many."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor + 1 for tensor in tensors)


@pytest.mark.parametrize("bare", [True, False], ids=["bare", "engine"])
@pytest.mark.parametrize("tensors", [1, 8])
@pytest.mark.benchmark(group="run of an engine, and of its session with all bound before")
def test_run(benchmark: BenchmarkFixture, tensors: int, *, bare: bool) -> None:
    call = tuple(torch.full((2, 4), float(number)) for number in range(tensors))
    model = ait.Module(
        Sums().eval(), strategy=ait.OneBackendStrategy("onnxruntime"), on_miss="error"
    )
    ait.tune(model, [call], device="cpu")
    dispatcher = model._aitune.dispatcher
    assert dispatcher is not None
    engine = dispatcher.graphs[0].engine
    benchmark.extra_info.update(tensors=tensors, what="bare session" if bare else "engine")
    if not bare:
        results = benchmark(engine.run, call)
    else:
        results = [torch.empty(2, 4) for _ in call]
        benchmark(_bound(engine._runner, call, results))  # type: ignore[attr-defined]
    for tensor, result in zip(call, results, strict=True):
        assert torch.equal(result, tensor + 1)


def _bound(runner: object, call: tuple[Tensor, ...], results: list[Tensor]) -> Callable[[], None]:
    session = runner._session  # type: ignore[attr-defined]
    device = ort_c.OrtDevice(ort_c.OrtDevice.cpu(), ort_c.OrtDevice.default_memory(), 0, 0)
    binding = ort_c.SessionIOBinding(session)
    for slot in runner.inputs:  # type: ignore[attr-defined]
        tensor = call[slot.index]
        binding.bind_input(slot.name, device, slot.onnx_type, tensor.shape, tensor.data_ptr())
    for slot, result in zip(runner.outputs, results, strict=True):  # type: ignore[attr-defined]
        binding.bind_output(slot.name, device, slot.onnx_type, result.shape, result.data_ptr())
    options = ort_c.RunOptions()
    return lambda: session.run_with_iobinding(binding, options)

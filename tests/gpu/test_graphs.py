"""CUDA graphs: replayed where a replay does the same, refused where it would not."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aitune_core as ait
from aitune_backend_onnxruntime.backend import ONNXRuntimeBackend
from aitune_backend_onnxruntime.errors import EngineRunError
from aitune_backend_onnxruntime.graphs import MAX_GRAPHS
from aitune_core.errors import BuildError
from aitune_core.specs import DynamicDim

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BATCH = DynamicDim("batch", 1, 128, 8)


def mlp(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def batched(make: Callable[..., Any], module: nn.Module, x: Tensor, **settings: Any) -> Any:
    return make(module, x, axes=[{0: BATCH}], out_axes=[{0: BATCH}], **settings)


def graphs(engine: Any) -> Any:
    return engine._runner.graphs


def assert_right(made: Any, results: Any, *inputs: Tensor) -> None:
    for got, expected in zip(results, made.eager(*inputs), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


class Pair(nn.Module):
    """Two inputs of different types, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)

    def forward(self, ids: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        looked_up = self.table(ids)
        return looked_up + x, (looked_up * x).sum(-1)


class ManyParts(nn.Module):
    """Joins so many tensors that their addresses are copied from the host."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x * number if number % 2 else x.relu() for number in range(40)])


class NonZero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x > 0).nonzero()


class Sizes(nn.Module):
    """Uses the values of sizes."""

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[0], device=x.device)
        return x + positions[:, None] * x.shape[0]


def test_recorded_size_is_replayed_and_results_stay(make: Callable[..., Any]) -> None:
    made = batched(make, mlp(), torch.randn(8, 64))
    engine = made.build()
    assert [attempt.detail for attempt in made.attempts if attempt.step == "CUDA graphs"] == [
        "captured for 1 size"
    ]
    assert [key[0] for key in graphs(engine).shapes] == [(8, 64)]
    inputs = [torch.randn(8, 64, device="cuda") for _ in range(50)]
    results = [engine([x]) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        assert_right(made, result, x)
    assert len({result[0].data_ptr() for result in results}) == len(results)


def test_other_sizes_are_captured_when_they_come_again(make: Callable[..., Any]) -> None:
    made = batched(make, mlp(), torch.randn(8, 64))
    engine = made.build()
    for calls in range(1, 6):
        x = torch.randn(5, 64, device="cuda")
        assert_right(made, engine([x]), x)
        assert len(graphs(engine)) == (1 if calls < 3 else 2)


def test_nothing_is_captured_beside_other_threads_unless_asked_for(
    make: Callable[..., Any],
) -> None:
    made = batched(make, mlp(), torch.randn(8, 64))
    automatic, always = made.build(), made.build(cuda_graphs=True)
    known = len(graphs(always))
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        for _ in range(6):
            x = torch.randn(77, 64, device="cuda")
            assert_right(made, automatic([x]), x)
            assert_right(made, always([x]), x)
        assert len(graphs(automatic)) == 1
        assert len(graphs(always)) == known + 1
    finally:
        stop.set()
        thread.join()


def test_number_of_graphs_is_bounded(make: Callable[..., Any]) -> None:
    made = batched(make, mlp(), torch.randn(8, 64))
    engine = made.build(cuda_graphs=True)
    for size in [*range(1, 100), *range(1, 100)]:
        x = torch.randn(size, 64, device="cuda")
        assert_right(made, engine([x]), x)
    assert len(graphs(engine)) == MAX_GRAPHS
    assert graphs(engine).shapes[-1][0] == (99, 64)


@pytest.mark.parametrize("grad", [False, True])
def test_several_tensors_of_all_layouts(make: Callable[..., Any], *, grad: bool) -> None:
    ids, x = torch.randint(50, (8, 4)), torch.randn(8, 4, 16)
    made = make(Pair(), ids, x, axes=[{0: BATCH}, {0: BATCH}], out_axes=[{0: BATCH}] * 2)
    engine = made.build()
    assert len(graphs(engine)) == 1
    strided = torch.randint(50, (4, 8), device="cuda").t()
    wide = torch.randn(8, 16, 4, device="cuda").transpose(1, 2).requires_grad_(grad)
    results = engine([strided, wide])
    assert not any(result.requires_grad for result in results)
    assert_right(made, results, strided, wide)
    with torch.inference_mode():
        results = engine([strided, wide])
        assert_right(made, results, strided, wide)


def test_convolution_and_half_precision(make: Callable[..., Any]) -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)).half()
    made = batched(make, module, torch.randn(8, 3, 32, 32).half(), tolerance=1e-2)
    engine = made.build()
    assert len(graphs(engine)) == 1
    for _ in range(5):
        x = torch.randn(8, 3, 32, 32, device="cuda").half()
        torch.testing.assert_close(engine([x])[0], made.eager(x)[0], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("module", [ManyParts(), NonZero()])
def test_what_cannot_be_replayed_is_refused(make: Callable[..., Any], module: nn.Module) -> None:
    made = make(module, torch.randn(4, 8))
    engine = made.build()
    (attempt,) = [attempt for attempt in made.attempts if attempt.step == "CUDA graphs"]
    assert not attempt.succeeded
    assert "the run cannot be captured" in attempt.detail
    for _ in range(10):
        x = torch.randn(4, 8, device="cuda")
        assert_right(made, engine([x]), x)
    assert len(graphs(engine)) == 0
    with pytest.raises(BuildError, match=r"cuda_graphs=True, but.*cannot be captured"):
        made.build(cuda_graphs=True)
    torch.cuda.manual_seed(3)
    assert torch.rand(4, device="cuda").shape == (4,)  # generators go on


def test_values_of_sizes_are_those_of_each_graph(make: Callable[..., Any]) -> None:
    made = batched(make, Sizes(), torch.randn(8, 16))
    engine = made.build()
    for _ in range(4):
        for size in (8, 3, 31):
            x = torch.randn(size, 16, device="cuda")
            assert_right(made, engine([x]), x)


def test_off_means_off(make: Callable[..., Any]) -> None:
    made = batched(make, mlp(), torch.randn(8, 64))
    engine = made.build(cuda_graphs=False)
    assert not engine.can_have_graphs
    assert not [attempt for attempt in made.attempts if attempt.step == "CUDA graphs"]


def test_stored_sizes_are_captured_again(
    make: Callable[..., Any], cases: Any, tmp_path: Path
) -> None:
    made = batched(make, mlp(), torch.randn(8, 64))
    artifacts = cases.stored(made.build(), tmp_path / "elsewhere")
    assert artifacts.data["graph_sizes"] == [{"batch": 8}]
    again = ONNXRuntimeBackend().load(artifacts, made.request.graph, torch.device("cuda", 0))
    assert [key[0] for key in graphs(again).shapes] == [(8, 64)]
    x = torch.randn(8, 64, device="cuda")
    assert_right(made, again([x]), x)


def test_work_before_and_after_on_other_streams(make: Callable[..., Any]) -> None:
    made = batched(make, mlp(1024), torch.randn(8, 1024))
    engine = made.build()
    big = torch.randn(4096, 4096, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    checks = []
    for trial in range(60):
        stream, reader = streams[trial % 3], streams[(trial + 1) % 3]
        fresh = torch.full((8, 1024), trial / 60, device="cuda")
        torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(stream):
            x = torch.zeros(8, 1024, device="cuda")
            _ = big @ big
            x.copy_(fresh)
            (result,) = engine([x])
            x.fill_(-2.0)
        reader.wait_stream(stream)
        with torch.cuda.stream(reader):
            result.record_stream(reader)
            checks.append((fresh, result.clone()))
    torch.cuda.synchronize()
    for fresh, result in checks:
        assert_right(made, [result], fresh)


def test_results_outlive_the_engine_and_its_stream(make: Callable[..., Any]) -> None:
    made = batched(make, mlp(2048), torch.randn(64, 2048))
    engine = made.build()
    inputs = [torch.randn(64, 2048, device="cuda") for _ in range(20)]
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = [engine([x])[0] for x in inputs]
    engine.close()
    del engine
    gc.collect()
    with torch.cuda.stream(stream):
        fillers = [torch.full((64, 2048), 7.0, device="cuda") for _ in range(40)]
    torch.cuda.synchronize()
    for x, result in zip(inputs, results, strict=True):
        assert_right(made, [result], x)
    assert len(fillers) == 40


def test_callers_own_capture_holds_a_plain_run(make: Callable[..., Any]) -> None:
    made = batched(make, mlp(), torch.randn(8, 64))
    engine = made.build()
    x = torch.randn(8, 64, device="cuda")
    engine([x])
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        (result,) = engine([x])
    for _ in range(3):
        x.copy_(torch.randn(8, 64, device="cuda"))
        captured.replay()
        assert_right(made, [result], x)
        y = torch.randn(8, 64, device="cuda")
        assert_right(made, engine([y]), y)


def test_threads_on_several_engines_while_others_capture(make: Callable[..., Any]) -> None:
    cases = [batched(make, mlp(width), torch.randn(8, width)) for width in (32, 64, 128)]
    engines = [made.build(cuda_graphs=True) for made in cases]

    def work(seed: int) -> tuple[int, int]:
        choice = random.Random(seed)
        wrong = 0
        stream = torch.cuda.Stream() if seed % 2 else torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        calls = 0
        with torch.cuda.stream(stream):
            for _ in range(800):
                which = choice.randrange(len(cases)) if seed >= 4 else 0
                width = (32, 64, 128)[which]
                x = torch.randn(choice.randint(1, 100), width, device="cuda")
                (result,) = engines[which]([x])
                (expected,) = cases[which].eager(x)
                wrong += not torch.allclose(result, expected, atol=1e-3, rtol=1e-3)
                calls += 1
        return wrong, calls

    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(work, range(8)))
    assert sum(wrong for wrong, _ in done) == 0
    assert sum(calls for _, calls in done) >= 5000
    assert len(graphs(engines[0])) == MAX_GRAPHS


def test_session_made_while_another_thread_captures(make: Callable[..., Any]) -> None:
    first, second = (batched(make, mlp(width), torch.randn(8, width)) for width in (32, 64))
    engine = first.build(cuda_graphs=True)
    stop = threading.Event()
    wrong = []

    def call() -> None:
        while not stop.is_set():
            for size in range(1, 100):
                x = torch.randn(size, 32, device="cuda")
                (result,) = engine([x])
                (expected,) = first.eager(x)
                if not torch.allclose(result, expected, atol=1e-3, rtol=1e-3):
                    wrong.append(size)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        for _ in range(3):
            built = second.build(cuda_graphs=False)
            x = torch.randn(5, 64, device="cuda")
            assert_right(second, built([x]), x)
            built.close()
    finally:
        stop.set()
        thread.join()
    assert not wrong


def test_capture_that_a_thread_breaks_is_tried_again_or_refused(make: Callable[..., Any]) -> None:
    made = batched(make, mlp(), torch.randn(8, 64))
    engine = made.build()
    engine._runner.graphs.always = True
    stop = threading.Event()

    def synchronize() -> None:
        while not stop.is_set():
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                assert "capturing" in str(error)

    thread = threading.Thread(target=synchronize)
    thread.start()
    refused = 0
    try:
        for size in range(1, 40):
            x = torch.randn(size, 64, device="cuda")
            try:
                (result,) = engine([x])
            except EngineRunError as error:
                assert "cannot be captured" in str(error)
                refused += 1
                continue
            (expected,) = made.eager(x)
            assert torch.allclose(result, expected, atol=1e-3, rtol=1e-3)
    finally:
        stop.set()
        thread.join()
    torch.cuda.synchronize()
    x = torch.randn(8, 64, device="cuda")
    assert_right(made, engine([x]), x)


def test_tuned_module_replays_and_says_so(tmp_path: Path) -> None:
    module = mlp().cuda().eval()
    model = ait.Module(module, strategy=ait.OneBackendStrategy("onnxruntime"), on_miss="error")
    calls = [torch.randn(size, 64, device="cuda") for size in (8, 4)]
    report = ait.tune(model, calls)
    assert "captured for 2 sizes" in str(report)
    for x in calls:
        torch.testing.assert_close(model(x), module(x), atol=1e-3, rtol=1e-3)
    ait.save(model, tmp_path / "model.ait")
    again = ait.load(tmp_path / "model.ait", device="cuda")
    for x in calls:
        torch.testing.assert_close(again(x), module(x), atol=1e-3, rtol=1e-3)

"""Engines on a real GPU: ordered with PyTorch's streams, right for threads, placed where asked."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aitune_backend_onnxruntime.backend import ONNXRuntimeBackend
from aitune_backend_onnxruntime.config import ONNXExecutionProvider
from aitune_core.specs import DynamicDim

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BATCH = DynamicDim("batch", 1, 32, 8)
TRIALS = 40


def new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def mlp(width: int = 64, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).to(dtype)


def batched(make: Callable[..., Any], module: nn.Module, x: Tensor, **settings: Any) -> Any:
    return make(module, x, axes=[{0: BATCH}], out_axes=[{0: BATCH}], **settings)


class NonZero(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x > 0).nonzero(), x * 2


class WithScalar(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale


class Sizes(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.reshape(x.shape[0], -1, 2).transpose(1, 2), x.flatten()


@pytest.mark.parametrize("side_stream", [False, True], ids=["default-stream", "side-stream"])
def test_input_still_being_computed_is_waited_for(
    make: Callable[..., Any], *, side_stream: bool
) -> None:
    engine = batched(make, nn.Identity(), torch.randn(8, 4096)).build()
    big = torch.randn(8192, 8192, device="cuda")
    stream = new_stream() if side_stream else torch.cuda.current_stream()
    torch.cuda.synchronize()
    wrong = 0
    with torch.cuda.stream(stream):
        for trial in range(TRIALS):
            x = torch.full((8, 4096), -1.0, device="cuda")
            fresh = torch.full((8, 4096), float(trial), device="cuda")
            stream.synchronize()
            for _ in range(3):
                _ = big @ big
            x.copy_(fresh)
            (result,) = engine([x])
            x.fill_(-2.0)  # the engine must have read it before
            wrong += not bool((result == float(trial)).all())
    assert wrong == 0


def test_results_are_ready_for_the_callers_next_work_and_stay(make: Callable[..., Any]) -> None:
    engine = batched(make, mlp(512), torch.randn(8, 512)).build()
    inputs = [torch.randn(32, 512, device="cuda") for _ in range(20)]
    sums = []
    results = []
    for x in inputs:
        (result,) = engine([x])
        sums.append(result.sum())
        results.append(result)
    for total, result in zip(sums, results, strict=True):
        torch.testing.assert_close(total, result.sum())
    assert len({result.data_ptr() for result in results}) == len(results)


def test_threads_with_mixed_batches_are_all_right(make: Callable[..., Any]) -> None:
    made = batched(make, mlp(), torch.randn(8, 64))
    engine = made.build()

    def work(seed: int) -> int:
        choice = random.Random(seed)
        wrong = 0
        stream = new_stream() if seed % 2 else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            for _ in range(300):
                x = torch.randn(choice.randint(1, 32), 64, device="cuda")
                (result,) = engine([x])
                (expected,) = made.eager(x)
                wrong += not torch.allclose(result, expected, atol=1e-3, rtol=1e-3)
        return wrong

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_types_match_eager(make: Callable[..., Any], dtype: torch.dtype) -> None:
    made = batched(make, mlp(dtype=dtype), torch.randn(8, 64).to(dtype), tolerance=2e-2)
    engine = made.build()
    x = torch.randn(5, 64, device="cuda", dtype=dtype)
    (result,) = engine([x])
    assert result.dtype is dtype
    torch.testing.assert_close(result, made.eager(x)[0], rtol=2e-2, atol=2e-2)


def test_half_convolutions_match_eager(make: Callable[..., Any]) -> None:
    module = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3)).half()
    made = batched(make, module, torch.randn(8, 8, 16, 16).half(), tolerance=2e-2)
    engine = made.build()
    assert engine.model.facts.half_convolutions
    x = torch.randn(3, 8, 16, 16, device="cuda").half().to(memory_format=torch.channels_last)
    torch.testing.assert_close(engine([x])[0], made.eager(x)[0], rtol=2e-2, atol=2e-2)


def test_attention_runs_on_the_gpu(make: Callable[..., Any]) -> None:
    module = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).half()
    made = batched(make, module, torch.randn(8, 16, 64).half(), tolerance=3e-2)
    engine = made.build()
    assert engine.provider is ONNXExecutionProvider.CUDA
    assert engine.model.facts.operators["Attention"] == 1
    assert engine.placement["CUDAExecutionProvider"] > engine.placement.get(
        "CPUExecutionProvider", 0
    )


def test_session_is_tried_in_another_process_and_its_copies_are_told(
    make: Callable[..., Any],
) -> None:
    made = batched(make, mlp(), torch.randn(8, 64))
    engine = made.build(isolate=True)
    tried = [attempt for attempt in made.attempts if attempt.step == "session in a child process"]
    assert tried
    assert all(attempt.succeeded for attempt in tried), tried
    nodes, copies, graphs = engine.tables()
    assert nodes.rows[0][:2] == ("CUDAExecutionProvider", "all")
    assert copies.rows == (("none", "", 0),)
    assert graphs.rows == (("captured", "batch=8"),)
    print([attempt.detail for attempt in tried])


def test_copies_are_told_with_the_part_that_they_come_from(make: Callable[..., Any]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = WithScalar()

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return torch.relu(self.part(x, scale))

    # The number is on the CPU; the runtime copies it itself, or its binding does.
    engine = make(Scaled(), torch.randn(8, 64), torch.tensor(2.0)).build(isolate=True)
    _, copies, _ = engine.tables()
    assert set(copies.rows) <= {("none", "", 0), ("to the GPU", "part", 1)}
    print(copies.rows)


def test_copies_are_unknown_without_a_child_process(make: Callable[..., Any]) -> None:
    engine = batched(make, mlp(), torch.randn(8, 64)).build(isolate=False, cuda_graphs=False)
    _, copies, graphs = engine.tables()
    assert copies.rows[0][0] == "unknown"
    assert graphs.rows == (("none", "cuda_graphs=False"),)


def test_placement_is_reported(make: Callable[..., Any]) -> None:
    engine = batched(make, mlp(), torch.randn(8, 64)).build()
    assert engine.placement["CUDAExecutionProvider"] >= 3
    assert engine.placement.get("CPUExecutionProvider", 0) == 0
    slots = (*engine._runner.inputs, *engine._runner.outputs)
    on_cpu = [slot.name for slot in slots if getattr(slot, "written_on_cpu", False)]
    on_cpu += [slot.name for slot in slots if getattr(slot, "reads_on_cpu", False)]
    assert on_cpu == []


def test_shape_arithmetic_is_accepted_on_the_cpu(make: Callable[..., Any]) -> None:
    made = make(
        Sizes(),
        torch.randn(8, 6),
        axes=[{0: BATCH}],
        out_axes=[{0: BATCH}, {0: DynamicDim("all", 1, 999)}],
    )
    engine = made.build()
    x = torch.randn(5, 6, device="cuda")
    for result, expected in zip(engine([x]), made.eager(x), strict=True):
        torch.testing.assert_close(result, expected)


def test_data_dependent_sizes_are_right_from_several_streams(make: Callable[..., Any]) -> None:
    made = make(
        NonZero(),
        torch.randn(8, 6),
        axes=[{0: BATCH}],
        out_axes=[{0: DynamicDim("found", 0, 999)}, {0: BATCH}],
    )
    engine = made.build()

    def work(seed: int) -> int:
        wrong = 0
        with torch.cuda.stream(new_stream()):
            for number in range(50):
                x = torch.randn(1 + (seed + number) % 4, 6, device="cuda")
                found, twice = engine([x])
                wrong += not torch.equal(found, (x > 0).nonzero())
                wrong += not torch.equal(twice, x * 2)
            nothing, _ = engine([-torch.ones(2, 6, device="cuda")])
            wrong += nothing.shape != (0, 2)
        return int(wrong)

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4))) == 0


def test_strided_inputs_and_empty_ones(make: Callable[..., Any]) -> None:
    empty = DynamicDim("batch", 0, 32, 8)
    made = make(nn.ReLU(), torch.randn(8, 64), axes=[{0: empty}], out_axes=[{0: empty}])
    engine = made.build()
    x = torch.randn(64, 16, device="cuda").t()
    assert torch.equal(engine([x])[0], x.relu())
    assert engine([torch.empty(0, 64, device="cuda")])[0].shape == (0, 64)


def test_scalar_on_the_cpu_is_moved_and_read_at_once(cases: Any, tmp_path: Path) -> None:
    x, scale = torch.randn(8, 64, device="cuda"), torch.tensor(3.0)
    folder = tmp_path / "scalar"
    folder.mkdir()
    made = cases.make_case(WithScalar().cuda(), [x, scale], folder)
    engine = made.build()
    pinned = torch.tensor(5.0).pin_memory()
    (result,) = engine([x, pinned])
    pinned.fill_(9.0)
    torch.testing.assert_close(result, x * 5)


def test_more_runs_than_between_two_synchronisations(make: Callable[..., Any]) -> None:
    made = batched(make, mlp(), torch.randn(8, 64))
    engine = made.build()
    x = torch.randn(8, 64, device="cuda")
    (expected,) = made.eager(x)
    results = [engine([x])[0] for _ in range(2100)]
    assert all(torch.allclose(result, expected, atol=1e-3, rtol=1e-3) for result in results)


def test_build_and_runs_are_quiet(
    make: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    engine = batched(make, mlp(), torch.randn(8, 64)).build()
    engine([torch.randn(8, 64, device="cuda")])
    torch.cuda.synchronize()
    engine.close()
    assert capfd.readouterr() == ("", "")


def test_engine_loads_again_on_the_gpu(
    make: Callable[..., Any], cases: Any, tmp_path: Path
) -> None:
    made = batched(make, mlp(), torch.randn(8, 64))
    engine = made.build()
    x = torch.randn(8, 64, device="cuda")
    (expected,) = engine([x])
    artifacts = cases.stored(engine, tmp_path / "elsewhere")
    engine.close()
    again = ONNXRuntimeBackend().load(artifacts, made.request.graph, torch.device("cuda", 0))
    assert again.provider is ONNXExecutionProvider.CUDA
    torch.testing.assert_close(again([x])[0], expected)


def test_close_gives_memory_back(make: Callable[..., Any]) -> None:
    module = nn.Linear(8192, 8192)  # 256 MiB
    made = batched(make, module, torch.randn(8, 8192))
    made.build().close()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        engine = made.build()
        torch.cuda.empty_cache()
        held = before - torch.cuda.mem_get_info()[0]
        engine.close()
        torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert held >= 200 * 2**20
    assert before - torch.cuda.mem_get_info()[0] < 64 * 2**20

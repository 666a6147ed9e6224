"""The main job on a CUDA device, through the wrapped module as users call it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import aitune_core as ait

pytestmark = pytest.mark.gpu

_ROOT = Path(__file__).resolve().parents[2]
_TRIALS = 40


class Mlp(nn.Module):
    """Four linear layers."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU()))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        y: Tensor = self.layers(x)
        return y


def _tuned(
    module: nn.Module, calls: object, **options: object
) -> tuple[ait.Module, ait.TuneReport]:
    strategy = ait.OneBackendStrategy(("onnxruntime", {"execution_provider": "cuda", **options}))
    model = ait.Module(module.eval(), on_miss="error", strategy=strategy)
    report = ait.tune(model, calls, device="cuda")
    print(report)
    assert all(graph.winner == "onnxruntime" for graph in report.modules[0].graphs)
    return model, report


def _allowed(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}[dtype]


@pytest.fixture
def mlp_calls() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(rows, 256) for rows in (1, 8, 64)]


def test_input_still_being_computed_gives_right_results_on_any_stream(
    mlp_calls: list[Tensor],
) -> None:
    module = Mlp()
    model, _ = _tuned(module, mlp_calls)
    big = torch.randn(8192, 8192, device="cuda")
    wrong = {"default": 0, "side": 0}
    for name in wrong:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream = side if name == "side" else torch.cuda.default_stream()
        for _ in range(_TRIALS):
            fresh = torch.randn(8, 256, device="cuda")
            with torch.no_grad():
                expected = module.forward(fresh)
            buffer = torch.zeros(8, 256, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.stream(stream), torch.no_grad():
                for _ in range(3):
                    big @ big
                buffer.copy_(fresh)
                result = model(buffer)
                buffer.zero_()  # overwritten right after the call
                kept = result.clone()
            torch.cuda.synchronize()
            wrong[name] += not torch.allclose(kept, expected, atol=1e-3)
    print(f"race: wrong results of {_TRIALS} trials per stream: {wrong}")
    assert wrong == {"default": 0, "side": 0}


def test_eight_threads_share_a_tuned_module(mlp_calls: list[Tensor]) -> None:
    module = Mlp()
    model, _ = _tuned(module, mlp_calls)
    wrong: list[tuple[int, int]] = []

    def work(seed: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        for index in range(300):
            x = torch.randn(1 + (seed * 7 + index) % 64, 256, device="cuda", generator=generator)
            with torch.no_grad():
                if not torch.allclose(model(x), module.forward(x), atol=1e-3):
                    wrong.append((seed, index))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"threads: {len(wrong)} wrong of 2400 in {time.perf_counter() - start:.1f} s")
    assert wrong == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_transformer_layers_agree_with_eager(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to("cuda", dtype)
    calls = [torch.randn(b, n, 128, dtype=dtype) for b, n in ((2, 16), (4, 33), (8, 64))]
    model, _ = _tuned(module, calls)
    x = torch.randn(5, 40, 128, dtype=dtype, device="cuda")
    with torch.no_grad():
        expected, got = module.forward(x), model(x)
    assert got.dtype is dtype
    assert got.device == x.device
    assert float((got - expected).abs().max()) <= _allowed(dtype) * float(expected.abs().max())


@pytest.mark.parametrize("use_dynamo", [True, False])
def test_default_device_of_the_caller_may_be_the_gpu(*, use_dynamo: bool) -> None:
    class Positions(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + torch.arange(x.shape[1]))[:, 1:].flip(1)

    with torch.device("cuda"):
        calls = [torch.randn(2, 4), torch.randn(3, 9)]
        strategy = ait.OneBackendStrategy(("onnxruntime", {"use_dynamo": use_dynamo}))
        model = ait.Module(Positions().eval(), strategy=strategy, on_miss="error")
        ait.tune(model, calls)
        x = torch.randn(2, 6)
        assert torch.equal(model(x), Positions()(x))


def test_convolutions_agree_with_eager() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 8, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    model, report = _tuned(module, [torch.randn(b, 3, 32, 32) for b in (1, 4)])
    # The provider has no kernel for pooling of the newest opset; an older one is used.
    attempts = report.modules[0].graphs[0].candidates[0].attempts
    assert [
        (attempt.succeeded, "opset 20" in attempt.step)
        for attempt in attempts
        if attempt.step.startswith("export")
    ] == [(False, False), (True, True)]
    x = torch.randn(3, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    with torch.no_grad():
        assert torch.allclose(model(x), module(x), atol=1e-3)


def test_output_sizes_that_depend_on_values() -> None:
    class Positive(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0]

    model, _ = _tuned(
        Positive(), [torch.tensor([1.0, -1.0, 2.0]), torch.tensor([-1.0, -1.0, 3.0, 4.0])]
    )
    x = torch.tensor([5.0, -1.0, -2.0, 6.0], device="cuda")
    assert model(x).tolist() == [5.0, 6.0]
    assert model(-x.abs()).tolist() == []


def test_tensor_on_another_device_is_named_and_the_context_stays_usable(
    mlp_calls: list[Tensor],
) -> None:
    model, _ = _tuned(Mlp(), mlp_calls)
    with pytest.raises(ait.InputMismatchError) as caught:
        model(torch.randn(8, 256))
    assert caught.value.path is not None
    assert (caught.value.expected, caught.value.got) == ("cuda", "cpu")
    assert model(torch.randn(8, 256, device="cuda")).isfinite().all()


def test_cuda_provider_on_the_cpu_device_is_refused(mlp_calls: list[Tensor]) -> None:
    model = ait.Module(
        Mlp().eval(),
        strategy=ait.OneBackendStrategy(("onnxruntime", {"execution_provider": "cuda"})),
    )
    with pytest.raises((ait.TuningError, ait.AituneError)):
        ait.tune(model, mlp_calls, device="cpu")


def test_tensorrt_without_its_libraries_is_refused_by_name(mlp_calls: list[Tensor]) -> None:
    model = ait.Module(
        Mlp().eval(),
        strategy=ait.OneBackendStrategy(("onnxruntime", {"execution_provider": "tensorrt"})),
    )
    with pytest.raises(ait.TuningError) as caught:
        ait.tune(model, mlp_calls, device="cuda")
    (error,) = caught.value.exceptions
    assert isinstance(error, ait.BackendUnavailableError)
    print(f"TensorRT without libraries: {error}")
    assert error.missing is not None
    assert "nvinfer" in error.missing


_LOADER = """
import json, sys
import torch
import aitune_core as ait
path, inputs, device = sys.argv[1:]
x = torch.load(inputs, weights_only=True).to(device)
model = ait.load(path, device=device)
torch.save(model(x).cpu(), inputs + ".out")
print(json.dumps({"device": str(model(x).device)}))
"""


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_checkpoint_runs_in_a_new_process(
    device: str, mlp_calls: list[Tensor], tmp_path: Path
) -> None:
    module = Mlp()
    strategy = ait.OneBackendStrategy("onnxruntime")
    model = ait.Module(module.eval(), strategy=strategy)
    ait.tune(model, mlp_calls, device="cuda")
    checkpoint, inputs = tmp_path / "model.ait", tmp_path / "x.pt"
    ait.save(model, checkpoint)
    x = torch.randn(8, 256)
    torch.save(x, inputs)
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _LOADER, str(checkpoint), str(inputs), device],
        check=True,
        capture_output=True,
        text=True,
        env=dict(os.environ),
    )
    print(f"checkpoint on {device}: process took {time.perf_counter() - start:.1f} s")
    assert json.loads(done.stdout)["device"].startswith(device)
    got = torch.load(str(inputs) + ".out", weights_only=True)
    with torch.no_grad():
        expected = module.forward(x.cuda()).cpu()
    assert torch.allclose(got, expected, atol=1e-3)


def test_quick_start_runs_on_cuda() -> None:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(_ROOT / "docs" / "examples" / "quickstart.py")],
        check=False,
        capture_output=True,
        text=True,
    )
    print(done.stdout[-4000:], done.stderr[-2000:])
    print(f"quick start: {time.perf_counter() - start:.0f} s")
    assert done.returncode == 0
    assert "cuda" in done.stdout.lower()


def test_tuning_prints_nothing_by_itself(
    mlp_calls: list[Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = ait.Module(Mlp().eval(), strategy=ait.OneBackendStrategy("onnxruntime"))
        ait.tune(model, mlp_calls, device="cuda")
        model(mlp_calls[0].cuda())
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")

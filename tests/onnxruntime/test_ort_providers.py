"""Providers: asked of the linker, and options that ONNX Runtime really knows."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from aitune_backend_onnxruntime import providers
from aitune_backend_onnxruntime.backend import ONNXRuntimeBackend
from aitune_backend_onnxruntime.config import ONNXExecutionProvider, ONNXRuntimeBackendConfig
from aitune_backend_onnxruntime.errors import ProviderUnavailableError
from aitune_backend_onnxruntime.providers import (
    available_providers,
    check_provider,
    cuda_options,
    provider_list,
    resolve_provider,
    tensorrt_options,
    tensorrt_profile,
)
from aitune_core.specs import DynamicDim, GraphSpec

CPU, CUDA, TENSORRT = (
    ONNXExecutionProvider.CPU,
    ONNXExecutionProvider.CUDA,
    ONNXExecutionProvider.TENSORRT,
)
CAPI = Path(onnxruntime.__file__).parent / "capi"
ON_CPU = torch.device("cpu")
ON_CUDA = torch.device("cuda", 0)


class Three(nn.Module):
    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x.sum() + y.sum() + z.sum()


@pytest.fixture
def graph(case: Callable[..., Any]) -> GraphSpec:
    batch, length = DynamicDim("batch", 1, 8, 4), DynamicDim("length", 0, 77)
    made = case(
        Three(),
        torch.zeros(2, 3),
        torch.zeros(2, 5),
        torch.zeros(7),
        axes=[{0: batch}, {0: batch, 1: length}, {}],
    )
    spec: GraphSpec = made.request.graph
    return spec


@pytest.mark.parametrize(
    ("wanted", "device", "expected"),
    [
        (None, ON_CPU, CPU),
        (None, ON_CUDA, CUDA),
        (CPU, ON_CPU, CPU),
        (CUDA, ON_CUDA, CUDA),
        (TENSORRT, ON_CUDA, TENSORRT),
    ],
)
def test_device_decides_unless_told(
    wanted: ONNXExecutionProvider | None, device: torch.device, expected: ONNXExecutionProvider
) -> None:
    assert resolve_provider(wanted, device) is expected


@pytest.mark.parametrize(
    ("wanted", "device"), [(CUDA, ON_CPU), (TENSORRT, ON_CPU), (CPU, ON_CUDA), (None, "meta")]
)
def test_provider_of_another_device_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    wanted: ONNXExecutionProvider | None,
    device: torch.device | str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ProviderUnavailableError) as caught:
        resolve_provider(wanted, torch.device(device))
    assert caught.value.provider == (wanted or CPU).ort_name
    assert "device=" in str(caught.value)


def test_provider_for_a_device_that_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ProviderUnavailableError, match="PyTorch sees no CUDA device here"):
        resolve_provider(CUDA, ON_CPU)


def test_cpu_is_always_available() -> None:
    check_provider(CPU)
    ONNXRuntimeBackend().check_available(ON_CPU)
    assert "CPUExecutionProvider" in available_providers()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CUDA provider may load here")
def test_cuda_without_its_libraries_names_what_is_missing() -> None:
    with pytest.raises(ProviderUnavailableError) as caught:
        ONNXRuntimeBackend().check_available(ON_CUDA)
    error = caught.value
    assert error.provider == "CUDAExecutionProvider"
    assert error.missing is not None
    assert re.fullmatch(r"lib(cublas|cublasLt|cudart|curand)\.so\.\d+", error.missing)
    assert error.missing in str(error)
    assert error.available == ("CPUExecutionProvider",)
    assert "onnxruntime-gpu" in (error.install_hint or "")
    assert error.backend_name == "onnxruntime"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the TensorRT provider may load here")
def test_tensorrt_without_its_libraries_names_what_is_missing() -> None:
    backend = ONNXRuntimeBackend(ONNXRuntimeBackendConfig(execution_provider="tensorrt"))
    with pytest.raises(ProviderUnavailableError) as caught:
        backend.check_available(ON_CUDA)
    error = caught.value
    assert error.provider == "TensorrtExecutionProvider"
    assert (error.missing or "").startswith("lib")
    assert (error.missing or "") in str(error)
    assert error.install_hint == "pip install 'tensorrt-cu13-libs>=10.14.1,<11'"


def test_build_without_gpu_support_names_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr(onnxruntime, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(ProviderUnavailableError) as caught:
        check_provider(CUDA)
    assert caught.value.missing == "libonnxruntime_providers_cuda.so"
    assert "pip install onnxruntime-gpu" in (caught.value.install_hint or "")


def test_package_without_gpu_support_is_named_when_it_hides_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr(onnxruntime, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(providers, "_distribution_installed", lambda name: name == "onnxruntime")
    with pytest.raises(ProviderUnavailableError) as caught:
        check_provider(TENSORRT)
    assert "pip uninstall onnxruntime" in (caught.value.install_hint or "")


def test_unavailable_provider_stops_before_export(case: Callable[..., Any]) -> None:
    made = case(nn.Linear(3, 3), torch.randn(2, 3))
    for provider in ("cuda", "tensorrt"):
        with pytest.raises(ProviderUnavailableError):
            made.build(execution_provider=provider)
    assert made.attempts == []
    assert list(made.request.work_dir.iterdir()) == []


def test_cuda_options_follow_graph_and_device(graph: GraphSpec) -> None:
    options = cuda_options(graph, ON_CUDA, stream=4660, tf32=False, nhwc=False)
    assert options == {
        "user_compute_stream": "4660",
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": "0",
        "prefer_nhwc": "0",
    }


def test_cuda_options_of_a_static_graph_search_all(case: Callable[..., Any]) -> None:
    static = case(nn.ReLU(), torch.zeros(2)).request.graph
    options = cuda_options(static, torch.device("cuda", 3), stream=1, tf32=True, nhwc=True)
    assert options["cudnn_conv_algo_search"] == "EXHAUSTIVE"
    assert options["device_id"] == "3"
    assert options["use_tf32"] == "1"
    assert options["prefer_nhwc"] == "1"


def test_tensorrt_profile_covers_every_dynamic_input(graph: GraphSpec) -> None:
    names = ["t0", "t1", "t2"]
    assert tensorrt_profile(graph, "min", names) == "t0:1x3,t1:1x0"
    assert tensorrt_profile(graph, "opt", names) == "t0:4x3,t1:4x77"
    assert tensorrt_profile(graph, "max", names) == "t0:8x3,t1:8x77"
    assert tensorrt_profile(graph, "max", ["t1"]) == "t1:8x77"


def test_tensorrt_options_use_the_same_stream_and_words_for_bools(
    graph: GraphSpec, tmp_path: Path
) -> None:
    options = tensorrt_options(
        graph, ON_CUDA, stream=4660, cache_dir=tmp_path, input_names=["t0", "t1", "t2"]
    )
    assert options["user_compute_stream"] == "4660"
    assert options["trt_engine_cache_enable"] == options["trt_timing_cache_enable"] == "True"
    assert options["trt_engine_cache_path"] == options["trt_timing_cache_path"] == str(tmp_path)
    assert options["trt_profile_min_shapes"] == "t0:1x3,t1:1x0"
    bare = tensorrt_options(graph, ON_CUDA, stream=1, cache_dir=None, input_names=[])
    assert bare == {"device_id": "0", "user_compute_stream": "1"}


def test_providers_take_nodes_in_order() -> None:
    cuda, tensorrt = {"a": "1"}, {"b": "2"}
    names = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    listed = list(zip(names, [tensorrt, cuda, {}], strict=True))
    assert provider_list(TENSORRT, cuda, tensorrt) == listed
    assert provider_list(CUDA, cuda, tensorrt) == listed[1:]
    assert provider_list(CPU, cuda, tensorrt) == listed[2:]


def test_every_option_is_one_that_the_installed_runtime_knows(
    graph: GraphSpec, tmp_path: Path
) -> None:
    cuda_library = CAPI / "libonnxruntime_providers_cuda.so"
    if not cuda_library.is_file():
        pytest.skip("this ONNX Runtime has no CUDA provider")
    cuda = cuda_options(graph, torch.device("cuda", 1), stream=1, tf32=True, nhwc=True)
    tensorrt = tensorrt_options(graph, ON_CUDA, stream=1, cache_dir=tmp_path, input_names=["t0"])
    parser = next(CAPI.glob("onnxruntime_pybind11_state*")).read_bytes()
    content = cuda_library.read_bytes()
    assert [name for name in cuda if name.encode() not in content] == []
    for value in ("kSameAsRequested", "HEURISTIC", "EXHAUSTIVE"):
        assert value.encode() in content
    assert [name for name in tensorrt if name.encode() not in parser] == []


def test_tf32_follows_torch() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed in (True, False):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            assert providers.matmul_tf32_allowed() is allowed
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_tf32_is_read_from_the_newer_setting_too(precision: str) -> None:
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has only allow_tf32")
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = precision
        assert providers.matmul_tf32_allowed() is (precision == "tf32")
    finally:
        matmul.fp32_precision = before

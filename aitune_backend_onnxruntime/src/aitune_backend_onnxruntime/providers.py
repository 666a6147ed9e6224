"""Execution providers: which one, whether it can be loaded here, and with which options."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import io
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import onnxruntime
import torch

from aitune_backend_onnxruntime.config import ONNXExecutionProvider
from aitune_backend_onnxruntime.errors import ProviderUnavailableError

if TYPE_CHECKING:
    from collections.abc import Collection

    from aitune_core.specs import DynamicDim, GraphSpec

__all__ = [
    "available_providers",
    "check_provider",
    "cuda_options",
    "matmul_tf32_allowed",
    "provider_list",
    "resolve_provider",
    "tensorrt_options",
    "tensorrt_profile",
]

_CUDA_HINT: Final = (
    "pip install onnxruntime-gpu nvidia-cudnn-cu13, with a PyTorch that is built for CUDA 13"
)
_GPU_BUILD_HINT: Final = (
    "pip uninstall onnxruntime, then pip install onnxruntime-gpu: the two share one folder and "
    "the one without GPU support is in place"
)
_TENSORRT_HINT: Final = "pip install 'tensorrt-cu13-libs>=10.14.1,<11'"


def resolve_provider(
    wanted: ONNXExecutionProvider | None, device: torch.device
) -> ONNXExecutionProvider:
    """Return the provider for a device.

    Args:
        wanted: What the configuration asks for; None leaves it to the device.
        device: Where engines must run.

    Raises:
        ProviderUnavailableError: The provider does not run on such a device.
    """
    if wanted is None:
        on_cuda = device.type == "cuda"
        wanted = ONNXExecutionProvider.CUDA if on_cuda else ONNXExecutionProvider.CPU
    if device.type != wanted.device_type:
        step = f"tune with device={wanted.device_type!r} or choose another execution_provider"
        if wanted.device_type == "cuda" and not torch.cuda.is_available():
            step = "PyTorch sees no CUDA device here; choose another execution_provider"
        msg = (
            f"execution provider {wanted.ort_name} needs a device of type {wanted.device_type!r}, "
            f"got {str(device)!r}; {step}"
        )
        raise ProviderUnavailableError(
            msg,
            provider=wanted.ort_name,
            missing=f"a device of type {wanted.device_type!r}",
            install_hint=f"tune(..., device={wanted.device_type!r})",
        )
    return wanted


def check_provider(provider: ONNXExecutionProvider) -> None:
    """Check that ONNX Runtime can load a provider here, by loading its library.

    ONNX Runtime lists providers that it was built with, whether they load or not, and falls back
    to the CPU in silence when they do not; this asks the dynamic linker instead.

    Raises:
        ProviderUnavailableError: A library is missing; the error names it.
    """
    failure = _load_failure(provider)
    if failure is None:
        return
    missing = _missing_library(failure)
    hint = _TENSORRT_HINT if provider is ONNXExecutionProvider.TENSORRT else _CUDA_HINT
    if missing == _provider_library(provider).name:
        hint = _GPU_BUILD_HINT if _distribution_installed("onnxruntime") else _CUDA_HINT
    available = available_providers()
    msg = (
        f"execution provider {provider.ort_name} cannot be loaded: {failure}. "
        f"Available here: {', '.join(available)}. To get it: {hint}"
    )
    raise ProviderUnavailableError(
        msg, provider=provider.ort_name, missing=missing, install_hint=hint, available=available
    )


def available_providers() -> tuple[str, ...]:
    """Return ONNX Runtime's names of the providers whose libraries load here."""
    return tuple(
        provider.ort_name for provider in ONNXExecutionProvider if _load_failure(provider) is None
    )


def _library_name(stem: str) -> str:
    return f"{stem}.dll" if sys.platform == "win32" else f"lib{stem}.so"


def _provider_library(provider: ONNXExecutionProvider) -> Path:
    folder = Path(onnxruntime.__file__).parent / "capi"
    return folder / _library_name(f"onnxruntime_providers_{provider.value}")


def _load_failure(provider: ONNXExecutionProvider) -> str | None:
    if provider is ONNXExecutionProvider.CPU:
        return None
    library = _provider_library(provider)
    if not library.is_file():
        return f"{library.name}: the installed ONNX Runtime was built without this provider"
    shared = library.with_name(_library_name("onnxruntime_providers_shared"))
    failure: str | None = None
    for preload in (_preload_nothing, _preload_packages):
        preload()
        try:
            ctypes.CDLL(str(shared), mode=ctypes.RTLD_GLOBAL)
            ctypes.CDLL(str(library))
        except OSError as error:
            failure = str(error)
        else:
            return None
    return failure


def _preload_nothing() -> None:
    """Leave it to what PyTorch has loaded."""


def _preload_packages() -> None:
    """Load the NVIDIA libraries that were installed as Python packages."""
    with contextlib.redirect_stdout(io.StringIO()):  # preload_dlls reports failures with print
        onnxruntime.preload_dlls()
    spec = importlib.util.find_spec("tensorrt_libs")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for pattern in ("*nvinfer.so.10", "*nvinfer_10.dll", "*nvonnxparser*10*"):
            for file in sorted(Path(folder).glob(pattern)):
                with contextlib.suppress(OSError):
                    ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)


def _missing_library(failure: str) -> str:
    found = re.match(r"([^\s:]+\.(?:so|dll)[\w.]*):", failure)
    return Path(found.group(1)).name if found else failure


def _distribution_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def matmul_tf32_allowed() -> bool:
    """Tell whether PyTorch may use TF32 in matrix products."""
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # the program set the newer fp32_precision, which excludes this flag
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def cuda_options(
    graph: GraphSpec, device: torch.device, *, stream: int, tf32: bool, nhwc: bool
) -> dict[str, str]:
    """Return the options of the CUDA provider.

    Args:
        graph: The graph; with varying sizes, a search per new size would cost more than it gives.
        device: CUDA device, with an index.
        stream: Address of the CUDA stream to run on.
        tf32: Whether float32 matrix products may use TF32.
        nhwc: Whether convolutions should run with channels last.
    """
    options = {
        "user_compute_stream": str(stream),
        # The arena grows by what is needed: PyTorch's allocator wants the rest.
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC" if graph.dims else "EXHAUSTIVE",
        "use_tf32": "1" if tf32 else "0",
        "prefer_nhwc": "1" if nhwc else "0",
    }
    if device.index:  # giving 0, the default, makes ONNX Runtime warn
        options["device_id"] = str(device.index)
    return options


def tensorrt_options(
    graph: GraphSpec,
    device: torch.device,
    *,
    stream: int,
    cache_dir: Path | None,
    input_names: Collection[str],
) -> dict[str, str]:
    """Return the options of the TensorRT provider.

    No precision flag is set: the network is strongly typed, so precision is what the module has.

    Args:
        graph: The graph; its dims become the optimization profile, so that no call rebuilds.
        device: CUDA device, with an index.
        stream: Address of the CUDA stream to run on.
        cache_dir: Existing folder for engines and timings; None caches nothing.
        input_names: The inputs that the exported model has.
    """
    options = {"device_id": str(device.index or 0), "user_compute_stream": str(stream)}
    if cache_dir is not None:
        options |= {
            "trt_engine_cache_enable": "True",
            "trt_engine_cache_path": str(cache_dir),
            "trt_timing_cache_enable": "True",
            "trt_timing_cache_path": str(cache_dir),
        }
    for which in ("min", "opt", "max"):
        profile = tensorrt_profile(graph, which, input_names)
        if profile:
            options[f"trt_profile_{which}_shapes"] = profile
    return options


def tensorrt_profile(graph: GraphSpec, which: str, input_names: Collection[str]) -> str:
    """Return a profile such as ``"x:1x3x224x224,ids:1x16"`` of the inputs with varying sizes.

    Args:
        graph: The graph.
        which: ``"min"``, ``"opt"`` or ``"max"``.
        input_names: The inputs that the exported model has; others are left out.
    """
    return ",".join(
        f"{spec.name}:{'x'.join(str(_profile_size(size, which)) for size in spec.shape)}"
        for spec in graph.inputs
        if spec.dynamic_axes and spec.name in input_names
    )


def _profile_size(size: int | DynamicDim, which: str) -> int:
    if isinstance(size, int):
        return size
    wanted: int | None = getattr(size, which)
    return size.max if wanted is None else wanted


def provider_list(
    provider: ONNXExecutionProvider,
    cuda: dict[str, str],
    tensorrt: dict[str, str],
) -> list[tuple[str, dict[str, str]]]:
    """Return providers with options, in the order in which they take nodes."""
    providers: list[tuple[str, dict[str, str]]] = []
    if provider is ONNXExecutionProvider.TENSORRT:
        providers.append((provider.ort_name, tensorrt))
    if provider is not ONNXExecutionProvider.CPU:
        providers.append((ONNXExecutionProvider.CUDA.ort_name, cuda))
    providers.append((ONNXExecutionProvider.CPU.ort_name, {}))
    return providers

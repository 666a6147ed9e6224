"""What works of ONNX Runtime here, tried for real."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Final

import onnxruntime
import torch
from onnx import TensorProto, helper

from aitune_backend_onnxruntime.config import ONNXExecutionProvider
from aitune_backend_onnxruntime.errors import ProviderUnavailableError
from aitune_backend_onnxruntime.providers import check_provider
from aitune_backend_onnxruntime.session import ORT_ERRORS
from aitune_core.backend import Diagnosis

__all__ = ["diagnoses"]

#: Distributions that write the same folder; two of them overwrite each other.
_BUILDS: Final = ("onnxruntime", "onnxruntime-gpu")
_SILENT: Final = 4


def diagnoses() -> Iterator[Diagnosis]:
    """Try every execution provider, and look at what is installed."""
    for provider in ONNXExecutionProvider:
        yield _provider(provider)
    yield _packages()
    cuda = _cuda_versions()
    if cuda is not None:
        yield cuda


def _provider(provider: ONNXExecutionProvider) -> Diagnosis:
    try:
        check_provider(provider)
    except ProviderUnavailableError as error:
        repair = error.install_hint or ""
        reason = str(error).split(". Available here")[0]
        return Diagnosis(part=provider.value, available=False, reason=reason, repair=repair)
    if provider.device_type == "cuda" and not torch.cuda.is_available():
        return Diagnosis(
            part=provider.value,
            available=False,
            reason="its libraries load, and PyTorch sees no CUDA device",
            repair="install a PyTorch that is built for CUDA, and a driver that fits",
        )
    try:
        used = _run(provider)
    except ORT_ERRORS as error:
        return Diagnosis(part=provider.value, available=False, reason=f"a session fails: {error}")
    if provider.ort_name not in used:
        reason = f"ONNX Runtime fell back to {', '.join(used)}"
        return Diagnosis(part=provider.value, available=False, reason=reason)
    return Diagnosis(part=provider.value, available=True, reason="ran a model")


def _run(provider: ONNXExecutionProvider) -> list[str]:
    """Run a model of one operator; return the providers of its session."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "doctor",
        [value("x", TensorProto.FLOAT, [1])],
        [value("y", TensorProto.FLOAT, [1])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _SILENT
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=[provider.ort_name]
    )
    one = onnxruntime.OrtValue.ortvalue_from_shape_and_type([1], 1, "cpu", 0)
    session.run_with_ort_values(["y"], {"x": one})
    used: list[str] = session.get_providers()
    return used


def _packages() -> Diagnosis:
    found = {name: _version(name) for name in _BUILDS}
    installed = [f"{name} {version}" for name, version in found.items() if version]
    if len(installed) > 1:
        return Diagnosis(
            part="packages",
            available=False,
            reason=f"{' and '.join(installed)} share one folder, in which the later is in place",
            repair="pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu",
        )
    reason = installed[0] if installed else f"onnxruntime {onnxruntime.__version__}"
    return Diagnosis(part="packages", available=True, reason=reason)


def _cuda_versions() -> Diagnosis | None:
    """Compare the CUDA that ONNX Runtime was built for with that of PyTorch."""
    from onnxruntime.capi import build_and_package_info  # noqa: PLC0415 - absent in some builds

    built_for = getattr(build_and_package_info, "cuda_version", None)
    has = torch.version.cuda
    if not built_for or not has:
        return None
    fits = built_for.split(".")[0] == has.split(".")[0]
    reason = f"ONNX Runtime is built for CUDA {built_for}, PyTorch for {has}"
    repair = "" if fits else f"install a PyTorch that is built for CUDA {built_for.split('.')[0]}"
    return Diagnosis(part="cuda versions", available=fits, reason=reason, repair=repair)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aitune_backend_onnxruntime import diagnosis
from aitune_backend_onnxruntime.backend import ONNXRuntimeBackend
from aitune_backend_onnxruntime.config import ONNXExecutionProvider
from aitune_core import Diagnosis


def found() -> dict[str, Diagnosis]:
    return {each.part: each for each in ONNXRuntimeBackend().diagnose()}


def test_the_cpu_provider_ran_a_model() -> None:
    assert found()["cpu"] == Diagnosis(part="cpu", available=True, reason="ran a model")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_providers_that_cannot_run_say_why_and_what_to_do() -> None:
    for part in ("cuda", "tensorrt"):
        each = found()[part]
        assert not each.available
        assert each.reason
        assert each.repair


def test_two_builds_beside_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"onnxruntime": "1.2", "onnxruntime-gpu": "1.3"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    each = found()["packages"]
    assert not each.available
    assert each.reason.startswith("onnxruntime 1.2 and onnxruntime-gpu 1.3 share one folder")
    assert "pip uninstall" in each.repair


@pytest.mark.parametrize(("of_torch", "fits"), [("13.1", True), ("12.8", False)])
def test_majors_of_cuda_are_compared(
    monkeypatch: pytest.MonkeyPatch, of_torch: str, fits: bool
) -> None:
    from onnxruntime.capi import build_and_package_info  # noqa: PLC0415

    monkeypatch.setattr(build_and_package_info, "cuda_version", "13.0", raising=False)
    monkeypatch.setattr(torch.version, "cuda", of_torch)
    each = found()["cuda versions"]
    assert each.available is fits
    assert each.reason == f"ONNX Runtime is built for CUDA 13.0, PyTorch for {of_torch}"
    assert bool(each.repair) is not fits


@pytest.mark.parametrize(
    ("session", "words"),
    [(RuntimeError("no memory"), "a session fails: no memory"), (["Other"], "fell back to Other")],
)
def test_a_session_that_fails_or_falls_back_is_no_success(
    monkeypatch: pytest.MonkeyPatch, session: Any, words: str
) -> None:
    def make(*_: object, **__: object) -> SimpleNamespace:
        if isinstance(session, Exception):
            raise session
        return SimpleNamespace(run_with_ort_values=lambda *_: None, get_providers=lambda: session)

    monkeypatch.setattr("onnxruntime.InferenceSession", make)
    each = diagnosis._provider(ONNXExecutionProvider.CPU)
    assert not each.available
    assert words in each.reason

"""Discovery: finding the plugin loads no runtime."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import aitune_backend_onnxruntime
from aitune_backend_onnxruntime import hooks
from aitune_core.backend import Backend
from aitune_core.hookspecs import API_VERSION


def test_reference_names_an_importable_backend() -> None:
    (reference,) = hooks.aitune_register_backends()
    module, _, name = reference.target.partition(":")
    backend = getattr(importlib.import_module(module), name)
    assert issubclass(backend, Backend)
    assert backend.name == reference.name == "onnxruntime"
    assert reference.requires == ("onnx", "onnxscript", "onnxruntime")


def test_interface_version_is_the_cores() -> None:
    assert hooks.AITUNE_API_VERSION == API_VERSION


def test_hooks_and_configuration_load_no_runtime() -> None:
    program = (
        "import sys; import aitune_backend_onnxruntime.hooks as h; h.aitune_register_backends();"
        "from aitune_backend_onnxruntime import ONNXRuntimeBackendConfig, OnnxExportError;"
        "print(sorted({'onnx', 'onnxruntime', 'onnxscript', 'tensorrt'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_imported() -> None:
    for name in aitune_backend_onnxruntime.__all__:
        assert getattr(aitune_backend_onnxruntime, name).__name__ == name
    assert set(aitune_backend_onnxruntime.__all__) <= set(dir(aitune_backend_onnxruntime))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = aitune_backend_onnxruntime.nothing

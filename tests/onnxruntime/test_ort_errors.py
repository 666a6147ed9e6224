"""Errors: facts as attributes, which survive pickling."""

from __future__ import annotations

import pickle

import pytest

from aitune_backend_onnxruntime import (
    EngineRunError,
    OnnxExportError,
    ProviderPlacementError,
    ProviderUnavailableError,
    UnsupportedDtypeError,
)
from aitune_core.errors import BackendError, BackendUnavailableError, BuildError

ERRORS = [
    OnnxExportError("m", exporter="dynamo", hint="h"),
    UnsupportedDtypeError("m", dtype="complex64", path="x"),
    ProviderPlacementError("m", provider="CUDAExecutionProvider", operators={"Unique": 2}),
    ProviderUnavailableError(
        "m", missing="libx.so", install_hint="pip", provider="p", available=["q"]
    ),
    EngineRunError("m"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_error_survives_pickling(error: BackendError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == "m"
    assert vars(again) == vars(error)
    assert again.backend_name == "onnxruntime"


def test_errors_are_of_the_kinds_that_the_core_knows() -> None:
    assert issubclass(OnnxExportError, BuildError)
    assert issubclass(ProviderPlacementError, BuildError)
    assert issubclass(ProviderUnavailableError, BackendUnavailableError)
    assert issubclass(EngineRunError, BackendError)
    assert OnnxExportError("m").step == "export"

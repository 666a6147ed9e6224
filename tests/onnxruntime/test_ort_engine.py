"""Engines: saved, loaded elsewhere, closed at any moment."""

from __future__ import annotations

import gc
import json
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

from aitune_backend_onnxruntime.backend import ONNXRuntimeBackend
from aitune_backend_onnxruntime.config import ONNXExecutionProvider, ONNXRuntimeBackendConfig
from aitune_backend_onnxruntime.errors import ProviderUnavailableError
from aitune_core.backend import ArtifactReader, ArtifactWriter
from aitune_core.config import BackendConfig
from aitune_core.errors import (
    CheckpointError,
    CheckpointFormatError,
    ConfigError,
    EngineClosedError,
    InputMismatchError,
)
from aitune_core.specs import DynamicDim

MakeCase = Callable[..., Any]
StoredIn = Callable[[Any, str], ArtifactReader]
BATCH = DynamicDim("batch", 1, 9, 2)
CPU = torch.device("cpu")


@pytest.fixture
def made(case: MakeCase) -> Any:
    module = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 4))
    return case(module, torch.randn(2, 30), axes=[{0: BATCH}], out_axes=[{0: BATCH}])


@pytest.mark.parametrize("use_dynamo", [True, False])
def test_engine_loads_from_another_folder_when_the_first_is_gone(
    made: Any, stored_in: StoredIn, *, use_dynamo: bool
) -> None:
    engine = made.build(use_dynamo=use_dynamo)
    x = torch.randn(5, 30)
    (expected,) = engine([x])
    artifacts = stored_in(engine, "elsewhere")
    assert set(artifacts.files) == {"model_raw.onnx", "model_raw.onnx.data"}
    engine.close()
    shutil.rmtree(made.request.work_dir)
    again = ONNXRuntimeBackend().load(artifacts, engine.graph, CPU)
    assert torch.equal(again([x])[0], expected)
    assert again.model.exporter == engine.model.exporter
    assert again.provider is ONNXExecutionProvider.CPU


def test_stored_data_is_json_and_tells_how_it_was_built(made: Any) -> None:
    writer = ArtifactWriter()
    made.build(opset_version=20).save(writer)
    assert json.loads(json.dumps(writer.data)) == {
        "model": "model_raw.onnx",
        "exporter": "dynamo",
        "opset": 20,
        "provider": "cpu",
        "options": {
            "use_dynamo": True,
            "execution_provider": None,
            "opset_version": 20,
            "cuda_graphs": "auto",
            "precision": None,
            "float32_parts": [],
            "isolate": False,
            "isolate_seconds": 600.0,
        },
        "rewritten": None,
        "channels_last": False,
        "graph_sizes": [],
        "copies": None,
    }


def test_loaded_engine_can_be_saved_again(made: Any, stored_in: StoredIn) -> None:
    first = stored_in(made.build(), "first")
    engine = ONNXRuntimeBackend().load(first, made.request.graph, CPU)
    second = stored_in(engine, "second")
    assert second.data == first.data
    assert second.files == first.files
    made.request.check(ONNXRuntimeBackend().load(second, engine.graph, CPU))


def test_device_decides_the_provider_on_load(made: Any, stored_in: StoredIn) -> None:
    artifacts = stored_in(made.build(), "stored")
    for name in ("cuda", "tensorrt"):
        backend = ONNXRuntimeBackend(ONNXRuntimeBackendConfig(execution_provider=name))
        data = {**artifacts.data, "provider": name}
        reader = ArtifactReader(artifacts.directory, artifacts.files, data)
        engine = backend.load(reader, made.request.graph, CPU)
        assert engine.provider is ONNXExecutionProvider.CPU
        if not torch.cuda.is_available():
            with pytest.raises(ProviderUnavailableError) as caught:
                backend.load(reader, made.request.graph, torch.device("cuda", 0))
            assert caught.value.provider == ONNXExecutionProvider(name).ort_name


def test_rewritten_model_must_be_among_the_files(made: Any, stored_in: StoredIn) -> None:
    artifacts = stored_in(made.build(), "stored")
    data = {**artifacts.data, "rewritten": "another.onnx"}
    reader = ArtifactReader(artifacts.directory, artifacts.files, data)
    with pytest.raises(CheckpointError, match=r"no file 'another\.onnx'"):
        ONNXRuntimeBackend().load(reader, made.request.graph, CPU)


@pytest.mark.parametrize(
    "change",
    [
        {"extra": 1},
        {"options": {"register_custom_ops_library": "x.so"}},
        {"options": {"use_dynamo": "yes"}},
        {"options": None},
        {"provider": "openvino"},
        {"provider": None},
        {"exporter": "pickle"},
        {"model": 3},
        {"rewritten": 3},
        {"channels_last": 0},
        {"graph_sizes": 3},
        {"graph_sizes": [{"batch": 10}]},
        {"graph_sizes": [{"batch": 2.0}]},
        {"graph_sizes": [{"length": 2}]},
        {"graph_sizes": [{"batch": 2}] * 17},
    ],
)
def test_unknown_stored_data_is_refused(
    made: Any, stored_in: StoredIn, change: dict[str, Any]
) -> None:
    artifacts = stored_in(made.build(), "stored")
    reader = ArtifactReader(artifacts.directory, artifacts.files, {**artifacts.data, **change})
    with pytest.raises(CheckpointFormatError):
        ONNXRuntimeBackend().load(reader, made.request.graph, CPU)


def test_missing_stored_data_and_files_are_refused(made: Any, stored_in: StoredIn) -> None:
    artifacts = stored_in(made.build(), "stored")
    data = {name: value for name, value in artifacts.data.items() if name != "provider"}
    with pytest.raises(CheckpointFormatError):
        ONNXRuntimeBackend().load(
            ArtifactReader(artifacts.directory, artifacts.files, data), made.request.graph, CPU
        )
    with pytest.raises(CheckpointError):
        ONNXRuntimeBackend().load(
            ArtifactReader(artifacts.directory, (), artifacts.data), made.request.graph, CPU
        )


def test_weights_from_outside_the_checkpoint_are_refused(made: Any, stored_in: StoredIn) -> None:
    artifacts = stored_in(made.build(), "stored")
    outside = artifacts.directory.parent / "outside.bin"
    shutil.copy(artifacts.directory / "model_raw.onnx.data", outside)
    path = artifacts.directory / "model_raw.onnx"
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../outside.bin"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match=r"outside\.bin"):
        ONNXRuntimeBackend().load(artifacts, made.request.graph, CPU)


def test_model_of_another_graph_is_refused(made: Any, case: MakeCase, stored_in: StoredIn) -> None:
    other = case(nn.Linear(30, 4).double(), torch.randn(2, 30).double())
    artifacts = stored_in(other.build(), "other")
    with pytest.raises(CheckpointError, match="float64"):
        ONNXRuntimeBackend().load(artifacts, made.request.graph, CPU)


def test_close_is_idempotent_and_later_use_is_an_error(made: Any, stored_in: StoredIn) -> None:
    engine = made.build()
    engine.close()
    engine.close()
    assert engine.closed
    with pytest.raises(EngineClosedError) as caught:
        engine([torch.randn(2, 30)])
    assert caught.value.operation == "run"
    with pytest.raises(EngineClosedError) as caught:
        stored_in(engine, "late")
    assert caught.value.operation == "save"


def test_inputs_that_do_not_fit_are_refused_before_the_run(made: Any) -> None:
    engine = made.build()
    for wrong in (torch.randn(2, 31), torch.randn(10, 30), torch.randn(2, 30).double()):
        with pytest.raises(InputMismatchError):
            engine([wrong])


def test_close_while_threads_run_lets_them_finish(made: Any) -> None:
    engine = made.build()
    x = torch.randn(5, 30)
    (expected,) = made.eager(x)
    started, outcomes = threading.Barrier(9), []

    def work() -> None:
        started.wait()
        try:
            while True:
                (result,) = engine([x])
                if not torch.allclose(result, expected, atol=1e-5):
                    outcomes.append("wrong")
        except EngineClosedError:
            outcomes.append("closed")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    started.wait()
    engine.close()
    for thread in threads:
        thread.join(20)
    assert outcomes == ["closed"] * 8


def test_closing_or_forgetting_frees_the_session_without_the_collector(made: Any) -> None:
    gc.disable()
    try:
        for forget in (True, False):
            engine = made.build()
            runner = weakref.ref(engine._runner)
            assert runner() is not None
            if forget:
                del engine
            else:
                engine.close()
            assert runner() is None
    finally:
        gc.enable()


def test_backend_takes_only_its_own_configuration() -> None:
    with pytest.raises(ConfigError):
        ONNXRuntimeBackend(BackendConfig())
    config = ONNXRuntimeBackendConfig(execution_provider="cpu")
    assert ONNXRuntimeBackend(config).config is config
    assert ONNXRuntimeBackend(config) == ONNXRuntimeBackend(
        ONNXRuntimeBackendConfig(execution_provider="CPUExecutionProvider")
    )


def test_files_named_in_the_model_are_what_is_saved(made: Any, tmp_path: Path) -> None:
    engine = made.build()
    (engine.model.path.parent / "stray.bin").write_bytes(b"x")
    writer = ArtifactWriter()
    engine.save(writer)
    assert "stray.bin" not in writer.files
    assert all(source.is_file() for source in writer.files.values())
    assert tmp_path in engine.model.path.parents

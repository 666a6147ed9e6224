"""The configuration: loose input, strict values, named errors."""

from __future__ import annotations

import json

import pytest

from aitune_backend_onnxruntime import ONNXExecutionProvider, ONNXRuntimeBackendConfig
from aitune_core.errors import ConfigError

CUDA = ONNXExecutionProvider.CUDA


@pytest.mark.parametrize(
    "value", [CUDA, "cuda", "CUDA", "Cuda", "CUDAExecutionProvider", "cudaexecutionprovider"]
)
def test_provider_is_accepted_in_every_spelling(value: str) -> None:
    assert ONNXRuntimeBackendConfig(execution_provider=value).execution_provider is CUDA


@pytest.mark.parametrize("value", ["rocm", "", "cud", 1, True, b"cuda", ["cuda"]])
def test_unknown_provider_is_refused_with_what_is_allowed(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        ONNXRuntimeBackendConfig(execution_provider=value)  # type: ignore[arg-type]
    assert caught.value.field == "execution_provider"
    assert caught.value.value == value
    assert caught.value.allowed == ("cuda", "tensorrt", "cpu")


@pytest.mark.parametrize(
    ("use_dynamo", "opset"), [(True, 18), (True, 26), (False, 9), (False, 20), (True, None)]
)
def test_opset_within_the_exporters_range_is_kept(*, use_dynamo: bool, opset: int | None) -> None:
    config = ONNXRuntimeBackendConfig(use_dynamo=use_dynamo, opset_version=opset)
    assert config.opset_version == opset


@pytest.mark.parametrize(
    ("use_dynamo", "opset"),
    [(True, 17), (True, 27), (False, 21), (False, 8), (True, True), (True, 20.0), (True, "20")],
)
def test_opset_outside_the_exporters_range_is_refused(*, use_dynamo: bool, opset: object) -> None:
    with pytest.raises(ConfigError, match="opset_version") as caught:
        ONNXRuntimeBackendConfig(use_dynamo=use_dynamo, opset_version=opset)  # type: ignore[arg-type]
    assert caught.value.field == "opset_version"
    assert caught.value.value == opset


@pytest.mark.parametrize("value", [1, 0, "yes", None])
def test_use_dynamo_must_be_a_bool(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        ONNXRuntimeBackendConfig(use_dynamo=value)  # type: ignore[arg-type]
    assert caught.value.field == "use_dynamo"


@pytest.mark.parametrize("value", [1, 0, "yes", None, "AUTO"])
def test_cuda_graphs_takes_three_values(value: object) -> None:
    with pytest.raises(ConfigError, match="'auto', True or False") as caught:
        ONNXRuntimeBackendConfig(cuda_graphs=value)  # type: ignore[arg-type]
    assert caught.value.field == "cuda_graphs"
    for allowed in ("auto", True, False):
        assert ONNXRuntimeBackendConfig(cuda_graphs=allowed).cuda_graphs is allowed


@pytest.mark.parametrize("value", ["fp8", "float16", 16, True, ""])
def test_unknown_precision_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="fp16, bf16 or None") as caught:
        ONNXRuntimeBackendConfig(precision=value)  # type: ignore[arg-type]
    assert caught.value.field == "precision"


@pytest.mark.parametrize("value", ["head", ("",), (1,), {"head": 1}, None])
def test_parts_in_float32_are_names(value: object) -> None:
    with pytest.raises(ConfigError, match="must be names") as caught:
        ONNXRuntimeBackendConfig(precision="fp16", float32_parts=value)  # type: ignore[arg-type]
    assert caught.value.field == "float32_parts"


def test_parts_in_float32_need_a_precision() -> None:
    with pytest.raises(ConfigError, match="set precision, too"):
        ONNXRuntimeBackendConfig(float32_parts=("head",))


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), True, "60", None])
def test_time_for_a_child_process_is_a_positive_number(value: object) -> None:
    with pytest.raises(ConfigError, match="positive number of seconds") as caught:
        ONNXRuntimeBackendConfig(isolate_seconds=value)  # type: ignore[arg-type]
    assert caught.value.field == "isolate_seconds"
    assert ONNXRuntimeBackendConfig(isolate_seconds=30).isolate_seconds == 30


def test_isolation_is_on_or_off() -> None:
    assert ONNXRuntimeBackendConfig().isolate is True
    with pytest.raises(ConfigError, match="True or False") as caught:
        ONNXRuntimeBackendConfig(isolate="no")  # type: ignore[arg-type]
    assert caught.value.field == "isolate"


def test_precision_survives_json() -> None:
    config = ONNXRuntimeBackendConfig(precision="BF16", float32_parts=["head"])
    options = json.loads(json.dumps(config.to_options()))
    assert (options["precision"], options["float32_parts"]) == ("bf16", ["head"])
    assert ONNXRuntimeBackendConfig.from_options(options) == config


def test_unknown_option_is_named_by_both_ways_in() -> None:
    for make in (ONNXRuntimeBackendConfig, lambda **o: ONNXRuntimeBackendConfig.from_options(o)):
        with pytest.raises(ConfigError) as caught:
            make(opset=20)
        assert caught.value.field == "opset"
        allowed = caught.value.allowed
        assert isinstance(allowed, tuple)
        assert allowed[:3] == ("use_dynamo", "execution_provider", "opset_version")
        assert "cuda_graphs" in allowed


def test_fields_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        ONNXRuntimeBackendConfig(True)  # type: ignore[call-arg]


def test_options_survive_json() -> None:
    config = ONNXRuntimeBackendConfig(
        use_dynamo=False,
        execution_provider="TensorrtExecutionProvider",
        opset_version=19,
        cuda_graphs=True,
    )
    options = json.loads(json.dumps(config.to_options()))
    given = {
        "use_dynamo": False,
        "execution_provider": "tensorrt",
        "opset_version": 19,
        "cuda_graphs": True,
    }
    assert options == given | {name: options[name] for name in options.keys() - given.keys()}
    assert ONNXRuntimeBackendConfig.from_options(options) == config


def test_defaults_survive_json() -> None:
    config = ONNXRuntimeBackendConfig()
    options = json.loads(json.dumps(config.to_options()))
    assert ONNXRuntimeBackendConfig.from_options(options) == config


def test_configuration_is_frozen_hashable_and_compares_by_value() -> None:
    config = ONNXRuntimeBackendConfig(execution_provider="cpu")
    with pytest.raises(AttributeError):
        config.use_dynamo = False  # type: ignore[misc]
    assert {config} == {ONNXRuntimeBackendConfig(execution_provider=ONNXExecutionProvider.CPU)}

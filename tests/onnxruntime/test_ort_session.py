"""Sessions: what was asked for is what runs, or an error says why not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import onnxruntime
import pytest
import torch
from torch import nn

from aitune_backend_onnxruntime.config import ONNXExecutionProvider
from aitune_backend_onnxruntime.errors import (
    OnnxExportError,
    ProviderPlacementError,
    ProviderUnavailableError,
)
from aitune_backend_onnxruntime.model_file import Value
from aitune_backend_onnxruntime.session import (
    check_model,
    check_placement,
    open_session,
    session_setup,
)
from aitune_core.errors import BuildError
from aitune_core.specs import DynamicDim

MakeCase = Callable[..., Any]
BATCH = DynamicDim("batch", 1, 9, 2)
CPU: list[tuple[str, dict[str, str]]] = [("CPUExecutionProvider", {})]


@pytest.fixture
def engine(case: MakeCase) -> Any:
    return case(
        nn.Linear(3, 4), torch.randn(2, 3), axes=[{0: BATCH}], out_axes=[{0: BATCH}]
    ).build()


def test_session_is_quiet_and_has_what_was_asked_for(
    engine: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    session = open_session(session_setup(engine.model.path, CPU), engine.model.facts)
    assert session.get_providers() == ["CPUExecutionProvider"]
    options = session.get_session_options()
    assert options.intra_op_num_threads == torch.get_num_threads()
    assert options.get_session_config_entry("session.graph_optimizations_loop_level") == "0"
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CUDA provider may load here")
def test_provider_that_the_runtime_leaves_out_is_an_error(engine: Any) -> None:
    wanted = [("CUDAExecutionProvider", {}), *CPU]
    with pytest.raises(ProviderUnavailableError) as caught:
        open_session(session_setup(engine.model.path, wanted), engine.model.facts)
    assert caught.value.provider == "CUDAExecutionProvider"
    assert caught.value.available == ("CPUExecutionProvider",)


def test_broken_model_is_a_build_error_with_the_cause(engine: Any) -> None:
    engine.model.path.write_bytes(b"\xff\xff")
    with pytest.raises(BuildError) as caught:
        open_session(session_setup(engine.model.path, CPU), engine.model.facts)
    assert caught.value.step == "session"
    assert caught.value.__cause__ is not None


def test_half_precision_transformer_does_not_crash_the_process(case: MakeCase) -> None:
    module = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).half()
    x = torch.randn(2, 5, 16).half()
    made = case(module, x, axes=[{0: BATCH}], out_axes=[{0: BATCH}], tolerance=2e-2)
    engine = made.build()
    torch.testing.assert_close(engine([x])[0], made.eager(x)[0], rtol=2e-2, atol=2e-2)


def test_model_that_fits_its_graph_passes(engine: Any) -> None:
    check_model(engine.model.facts, engine.graph)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inputs": (Value("other", 1, (None, 3)),)}, "other"),
        ({"inputs": (Value("t0", 10, (None, 3)),)}, "float16"),
        ({"inputs": (Value("t0", 1, (None, 3, 1)),)}, "rank 3"),
        ({"inputs": (Value("t0", 1, (2, 3)),)}, "fixed axis 0 of input 't[0]' to 2"),
        ({"outputs": ()}, "0 outputs"),
        ({"outputs": (Value("o0", 7, (None, 4)),)}, "int64"),
    ],
)
def test_model_that_does_not_fit_its_graph_is_refused(
    engine: Any, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(OnnxExportError) as caught:
        check_model(attrs.evolve(engine.model.facts, **change), engine.graph)
    assert words in str(caught.value)


def test_pruned_input_is_no_error(engine: Any) -> None:
    check_model(attrs.evolve(engine.model.facts, inputs=()), engine.graph)


def assigned(**parts: list[tuple[str, str]]) -> Any:
    """Stands in for a session on a GPU: an object with the same assignment report."""

    def part(name: str, nodes: list[tuple[str, str]]) -> SimpleNamespace:
        listed = [SimpleNamespace(op_type=operator, name=node) for operator, node in nodes]
        return SimpleNamespace(ep_name=f"{name}ExecutionProvider", get_nodes=lambda: listed)

    report = [part(name, nodes) for name, nodes in parts.items()]
    return SimpleNamespace(get_provider_graph_assignment_info=lambda: report)


def test_report_of_a_real_session_is_counted(engine: Any) -> None:
    session = open_session(session_setup(engine.model.path, CPU), engine.model.facts)
    counts = check_placement(session, ONNXExecutionProvider.CPU, engine.model.facts)
    assert counts == {"CPUExecutionProvider": 1} == engine.placement


def test_report_has_the_attributes_that_are_read(engine: Any) -> None:
    session = open_session(session_setup(engine.model.path, CPU), engine.model.facts)
    assert isinstance(session, onnxruntime.InferenceSession)
    (part,) = session.get_provider_graph_assignment_info()
    (node,) = part.get_nodes()
    assert (part.ep_name, node.op_type, node.name) == (
        "CPUExecutionProvider",
        "Gemm",
        "node_linear",
    )


def test_sizes_on_the_cpu_are_accepted(engine: Any) -> None:
    session = assigned(CUDA=[("MatMul", "m")], CPU=[("Gather", "g"), ("Concat", "c")])
    facts = attrs.evolve(
        engine.model.facts, results={"g": Value("v", 7, ()), "c": Value("w", 1, (3,))}
    )
    counts = check_placement(session, ONNXExecutionProvider.CUDA, facts)
    assert counts == {"CUDAExecutionProvider": 1, "CPUExecutionProvider": 2}


def test_provider_that_took_nothing_is_an_error(engine: Any) -> None:
    session = assigned(CUDA=[("MatMul", "m")], CPU=[("Gather", "g")])
    facts = attrs.evolve(engine.model.facts, results={})
    with pytest.raises(ProviderPlacementError) as caught:
        check_placement(session, ONNXExecutionProvider.TENSORRT, facts)
    assert caught.value.provider == "TensorrtExecutionProvider"


def test_computation_on_the_cpu_is_refused_by_name(engine: Any) -> None:
    session = assigned(
        CUDA=[("MatMul", "m")],
        CPU=[("Unique", "u"), ("Unique", "v"), ("Gather", "g"), ("Mul", "k")],
    )
    facts = attrs.evolve(
        engine.model.facts, results={"k": Value("k", 1, (None, 4)), "g": Value("g", 7, (None, 4))}
    )
    with pytest.raises(ProviderPlacementError) as caught:
        check_placement(session, ONNXExecutionProvider.CUDA, facts)
    assert caught.value.operators == {"Unique": 2, "Mul": 1}
    assert caught.value.provider == "CUDAExecutionProvider"
    assert "Unique (2)" in str(caught.value)

"""Export: sizes stay free, wrong numbers do not pass, and nothing of the user's changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from aitune_backend_onnxruntime.config import ONNXRuntimeBackendConfig
from aitune_backend_onnxruntime.errors import OnnxExportError
from aitune_backend_onnxruntime.export import export, export_plans, older_plan
from aitune_backend_onnxruntime.model_file import facts_of, read_model
from aitune_core.errors import BuildError, ValidationError
from aitune_core.specs import DynamicDim, GraphSpec

MakeCase = Callable[..., Any]

BATCH = DynamicDim("batch", 1, 9, 2)
LENGTH = DynamicDim("length", 1, 12, 5)
DYNAMIC = "export with dynamo, Dim.DYNAMIC"
AUTO = "export with dynamo, Dim.AUTO"
STATIC = "export with dynamo"
TRACER = "export with the tracer"
BOTH: dict[str, Any] = {
    "axes": [{0: BATCH, 1: LENGTH}],
    "out_axes": [{0: BATCH, 1: LENGTH}],
}


class LoopOverLength(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total = x[:, 0]
        for position in range(x.shape[1]):
            total = total + x[:, position]
        return total


class BranchOnBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 4 else x * 3


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.rnn(x)[0]
        return result


class Pair(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = x @ y
        return z, z, x


class IgnoresSecond(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * 2


class Attention(nn.Module):
    def forward(self, q: Tensor, mask: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def session_shapes(path: Path) -> list[list[object]]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return [value.shape for value in session.get_inputs()]


def test_plans_go_from_strict_to_last_resort(case: MakeCase) -> None:
    graph = case(nn.Linear(3, 3), torch.randn(2, 3), axes=[{0: BATCH}]).request.graph
    plans = export_plans(ONNXRuntimeBackendConfig(), graph)
    assert [plan.step for plan in plans] == [DYNAMIC, AUTO, TRACER]
    assert [plan.opset for plan in plans] == [23, 23, 20]
    (only,) = export_plans(ONNXRuntimeBackendConfig(use_dynamo=False, opset_version=17), graph)
    assert (only.step, only.opset, only.note) == (TRACER, 17, "")
    plans = export_plans(ONNXRuntimeBackendConfig(opset_version=21), graph)
    assert [plan.opset for plan in plans] == [21, 21, 20]
    assert "20" in plans[2].note


def test_static_graph_needs_no_declaration_of_sizes(case: MakeCase) -> None:
    made = case(nn.Linear(3, 3), torch.randn(2, 3))
    plans = export_plans(ONNXRuntimeBackendConfig(), made.request.graph)
    assert [plan.step for plan in plans] == [STATIC, TRACER]


@pytest.mark.parametrize("use_dynamo", [True, False])
def test_dynamic_axes_stay_free(case: MakeCase, *, use_dynamo: bool) -> None:
    module = (
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        if use_dynamo
        else nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16))
    )
    made = case(module, torch.randn(2, 5, 16), **BOTH)
    engine = made.build(use_dynamo=use_dynamo)
    assert made.steps == [(DYNAMIC if use_dynamo else TRACER, True)]
    (shape,) = session_shapes(engine.model.path)
    assert [isinstance(size, str) for size in shape] == [True, True, False]
    for batch in (1, 2, 5, 9):
        for length in (1, 3, 12):
            x = torch.randn(batch, length, 16)
            torch.testing.assert_close(engine([x])[0], made.eager(x)[0], rtol=1e-4, atol=1e-5)


def test_tracer_gets_no_fused_operator_that_has_no_onnx_form(case: MakeCase) -> None:
    module = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    made = case(module, torch.randn(2, 5, 16))
    made.build(use_dynamo=False)
    assert made.steps == [(TRACER, True)]


@pytest.mark.parametrize("use_dynamo", [True, False])
def test_weights_lie_in_one_file_next_to_the_model(case: MakeCase, *, use_dynamo: bool) -> None:
    made = case(nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 60)), torch.randn(2, 40))
    engine = made.build(use_dynamo=use_dynamo)
    files = sorted(path.name for path in made.request.work_dir.iterdir())
    assert files == ["model_raw.onnx", "model_raw.onnx.data"]
    assert engine.model.facts.external_files == ("model_raw.onnx.data",)
    assert engine.model.path.stat().st_size < 10_000


@pytest.mark.parametrize("use_dynamo", [True, False])
def test_model_tells_nothing_about_the_users_source(case: MakeCase, *, use_dynamo: bool) -> None:
    engine = case(LoopOverLength(), torch.randn(2, 5, 4)).build(use_dynamo=use_dynamo)
    content = engine.model.path.read_bytes()
    assert b"LoopOverLength" not in content
    assert str(Path(__file__).parent).encode() not in content
    onnx.checker.check_model(str(engine.model.path))


@pytest.mark.parametrize("opset", [18, 20, 23, 24, 25, 26])
def test_requested_opset_is_what_comes_out(case: MakeCase, opset: int) -> None:
    engine = case(nn.Linear(3, 3), torch.randn(2, 3)).build(opset_version=opset)
    assert engine.model.facts.opset == opset


def test_attention_is_one_operator_and_right_for_fully_masked_rows(case: MakeCase) -> None:
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    mask[..., 2, :] = False
    made = case(Attention(), torch.randn(2, 4, 5, 8), mask)
    engine = made.build()
    assert made.steps == [(STATIC, True)]
    assert engine.model.facts.operators["Attention"] == 1


def test_code_that_depends_on_a_length_is_refused_by_name(case: MakeCase) -> None:
    made = case(LoopOverLength(), torch.randn(2, 5, 4), axes=BOTH["axes"], out_axes=[{0: BATCH}])
    with pytest.raises(BuildError) as caught:
        made.build()
    assert [step for step, _ in made.steps] == [DYNAMIC, AUTO, f"{AUTO}, opset 20", TRACER]
    assert not any(succeeded for _, succeeded in made.steps)
    assert "axis 1 of input 't[0]' (length[1..12])" in made.attempts[0].detail
    for attempt in made.attempts:
        assert attempt.detail.removeprefix(attempt.step).strip() in str(caught.value)
    assert caught.value.step == "check"
    assert isinstance(caught.value.__cause__, ValidationError)


def test_branch_on_a_size_is_never_silently_wrong(case: MakeCase) -> None:
    made = case(BranchOnBatch(), torch.randn(2, 5), axes=[{0: BATCH}], out_axes=[{0: BATCH}])
    with pytest.raises(BuildError):
        made.build()
    assert not any(succeeded for _, succeeded in made.steps)


def test_recurrence_over_a_length_is_right_or_refused(case: MakeCase) -> None:
    made = case(Recurrent(), torch.randn(2, 5, 4), **BOTH)
    engine = made.build()
    for length in (1, 2, 7, 12):
        x = torch.randn(3, length, 4)
        torch.testing.assert_close(engine([x])[0], made.eager(x)[0], rtol=1e-4, atol=1e-5)


def test_engines_of_failed_attempts_are_closed(case: MakeCase) -> None:
    made = case(nn.Linear(3, 3), torch.randn(2, 3), axes=[{0: BATCH}], out_axes=[{0: BATCH}])
    seen = []

    def check(engine: Any) -> None:
        seen.append(engine)
        if len(seen) < 4:
            msg = "wrong"
            raise ValidationError(msg)

    made.request = attrs.evolve(made.request, check=check)
    engine = made.build()
    older = f"{DYNAMIC}, opset 20"
    assert made.steps == [(DYNAMIC, False), (older, False), (AUTO, False), (TRACER, True)]
    assert [one.closed for one in seen] == [True, True, True, False]
    assert seen[3] is engine
    assert engine.model.exporter == "tracer"
    x = torch.randn(4, 3)
    torch.testing.assert_close(engine([x])[0], made.eager(x)[0])


def test_an_error_of_the_check_itself_closes_the_engine(case: MakeCase) -> None:
    made = case(nn.Linear(3, 3), torch.randn(2, 3))
    seen = []

    def check(engine: Any) -> None:
        seen.append(engine)
        raise KeyboardInterrupt

    made.request = attrs.evolve(made.request, check=check)
    with pytest.raises(KeyboardInterrupt):
        made.build()
    assert seen[0].closed


def test_export_that_no_exporter_can_do_keeps_the_cause(case: MakeCase) -> None:
    class Unknown(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = torch.special.airy_ai(x)
            return result

    made = case(Unknown(), torch.randn(2, 3))
    with pytest.raises(OnnxExportError) as caught:
        made.build()
    error = caught.value
    assert error.step == "export"
    assert error.exporter == "dynamo"
    assert "airy" in str(error)
    assert isinstance(error.__cause__, OnnxExportError)
    assert error.__cause__.__cause__ is not None
    assert error.hint is not None
    assert "wrap a part of the module without what is named" in error.hint


def test_module_that_looks_at_values_is_told_what_to_do_instead(case: MakeCase) -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(OnnxExportError, match=r"Next: choose with operators \(torch\.where\)"):
        case(Branch(), torch.randn(2, 3)).build()


def test_missing_kernel_names_operator_and_dtype(case: MakeCase) -> None:
    made = case(nn.Linear(3, 3).bfloat16(), torch.randn(2, 3).bfloat16())
    with pytest.raises(BuildError) as caught:
        made.build()
    assert caught.value.step == "session"
    assert "Gemm" in str(caught.value)
    assert "bfloat16" in str(caught.value)
    assert "float32" in str(caught.value)


@pytest.mark.parametrize("use_dynamo", [True, False])
def test_repeated_and_passed_through_outputs_are_kept(case: MakeCase, *, use_dynamo: bool) -> None:
    made = case(Pair(), torch.randn(2, 3), torch.randn(3, 4))
    engine = made.build(use_dynamo=use_dynamo)
    inputs = torch.randn(2, 3), torch.randn(3, 4)
    results = engine(inputs)
    for result, expected in zip(results, made.eager(*inputs), strict=True):
        torch.testing.assert_close(result, expected)
    assert len({result.data_ptr() for result in results}) == 3


@pytest.mark.parametrize("use_dynamo", [True, False])
def test_unused_input_is_accepted(case: MakeCase, *, use_dynamo: bool) -> None:
    made = case(
        IgnoresSecond(),
        torch.randn(2, 3),
        torch.randn(2, 4),
        axes=[{0: BATCH}, {0: BATCH}],
        out_axes=[{0: BATCH}],
    )
    engine = made.build(use_dynamo=use_dynamo)
    x = torch.randn(5, 3)
    assert torch.equal(engine([x, torch.randn(5, 4)])[0], x * 2)


@pytest.mark.parametrize("use_dynamo", [True, False])
def test_user_module_and_inputs_are_left_alone(case: MakeCase, *, use_dynamo: bool) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.RNN(4, 4))
    module[3].forward = lambda x: x * 2
    x = torch.randn(3, 4)
    made = case(module, x, axes=[{0: BATCH}], out_axes=[{0: BATCH}])
    module[0].weight.requires_grad_(False)
    module[2].training = True
    module[2].p = 0.0  # type: ignore[assignment]
    state = {name: value.clone() for name, value in module.state_dict().items()}
    flags = [(part.training, sorted(vars(part))) for part in module.modules()]
    grads = [parameter.requires_grad for parameter in module.parameters()]
    addresses = [parameter.data_ptr() for parameter in module.parameters()]
    attributes = sorted(vars(x))
    before = x.clone()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    made.build(use_dynamo=use_dynamo)
    assert [(part.training, sorted(vars(part))) for part in module.modules()] == flags
    assert [parameter.requires_grad for parameter in module.parameters()] == grads
    assert [parameter.data_ptr() for parameter in module.parameters()] == addresses
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name])
    assert torch.equal(x, before)
    assert sorted(vars(x)) == attributes
    assert torch.backends.mha.get_fastpath_enabled() == fast_path
    assert torch.is_grad_enabled()


def test_recurrent_weights_are_still_parameters_after_export(case: MakeCase) -> None:
    module = Recurrent()
    case(module, torch.randn(2, 5, 4)).build()
    assert all(
        weight is parameter
        for weight, parameter in zip(
            module.rnn._flat_weights,
            module.parameters(),
            strict=True,
        )
    )


def test_exporting_again_gives_the_same_answer(case: MakeCase) -> None:
    x = torch.randn(2, 5, 16)
    module = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    for _ in range(3):
        made = case(module, x, **BOTH)
        made.build()
        assert made.steps == [(DYNAMIC, True)]


def test_new_export_does_not_touch_files_that_a_session_maps(case: MakeCase) -> None:
    made = case(nn.Linear(64, 64), torch.randn(2, 64))
    first = made.build()
    x = torch.randn(2, 64)
    before = first([x])[0].clone()
    with torch.no_grad():
        made.request.module.module.weight.zero_()
    second = made.build()
    assert torch.equal(first([x])[0], before)
    torch.testing.assert_close(second([x])[0], made.eager(x)[0])


def test_sizes_with_one_value_are_exported_as_static(case: MakeCase) -> None:
    one = DynamicDim("one", 3, 3)
    made = case(nn.Linear(4, 4), torch.randn(3, 4), axes=[{0: one}], out_axes=[{0: one}])
    engine = made.build()
    assert made.steps == [(STATIC, True)]
    assert session_shapes(engine.model.path) == [[3, 4]]


def test_failed_export_leaves_no_files(case: MakeCase) -> None:
    made = case(nn.Linear(3, 3), torch.randn(2, 3))
    (plan, _) = export_plans(ONNXRuntimeBackendConfig(), made.request.graph)
    with pytest.raises(OnnxExportError):
        export(plan, made.request, [torch.randn(2, 99)])
    assert list(made.request.work_dir.iterdir()) == []


def test_export_can_be_called_on_its_own(case: MakeCase) -> None:
    made = case(nn.Linear(3, 3), torch.randn(2, 3))
    for plan in export_plans(ONNXRuntimeBackendConfig(), made.request.graph):
        exported = export(plan, made.request, made.request.samples[0])
        facts = facts_of(read_model(exported.path))
        assert [value.name for value in facts.inputs] == ["t0"]
        assert [value.name for value in facts.outputs] == ["o0"]
        assert facts.opset == plan.opset


def test_older_plan_keeps_the_way_and_lowers_the_opset() -> None:
    empty = GraphSpec(name="g", inputs=(), outputs=(), call_structure=(), result_structure=("*",))
    first = export_plans(ONNXRuntimeBackendConfig(), empty)[0]
    older = older_plan(first)
    assert older is not None
    assert (first.opset, older.opset, older.shapes) == (23, 20, first.shapes)
    assert older_plan(older) is None

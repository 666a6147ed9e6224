"""Real compilations, each of some seconds; the tests share what they compiled."""

from __future__ import annotations

import copy
import gc
import importlib
import logging
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from fake_plugin import empty_registry
from samples import Affine, evaluated, graphs_of, mlp
from torch import Tensor, nn

import aitune_core as ait
from aitune_core import (
    BackendUnavailableError,
    BuildError,
    CheckpointError,
    ConfigError,
    EngineClosedError,
    InputMismatchError,
    Outcome,
    TuneReport,
    ValidationError,
    _measurement,
    _stopwatch,
)
from aitune_core._cuda_graph_runs import CudaGraphRuns
from aitune_core._graphs import DynamicShapes
from aitune_core._inductor import InductorBackend, InductorConfig, InductorEngine
from aitune_core._quiet import quiet_compilers

CPU = torch.device("cpu")


def outcome_of(
    module: Any,
    *calls: Any,
    backend: InductorBackend | None = None,
    dynamic_shapes: DynamicShapes | None = None,
) -> Outcome:
    backend = backend or InductorBackend()
    return evaluated(backend, module, *calls, dynamic_shapes=dynamic_shapes)


def engine_of(outcome: Outcome) -> InductorEngine:
    assert outcome.error is None
    assert isinstance(outcome.engine, InductorEngine)
    return outcome.engine


class Wide(nn.Module):
    """Has many dtypes, ranks and outputs, some of which share memory with others."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.register_buffer("table", torch.randn(10, 4))

    def forward(
        self, x: Tensor, ids: Tensor, mask: Tensor, scale: Tensor, half: Tensor
    ) -> dict[str, Tensor]:
        embedded = nn.functional.embedding(ids, self.table)
        hidden = self.linear(x + embedded) * scale
        masked = hidden.masked_fill(mask[..., None], 0.0)
        return {
            "hidden": masked.softmax(-1),
            "turned": masked.transpose(0, 1),
            "pooled": hidden.sum(1),
            "same": x,
            "table": self.table,
            "ids": ids + 1,
            "mask": ~mask,
            "half": half * 2,
        }


def wide_inputs(batch: int, length: int) -> tuple[Tensor, ...]:
    torch.manual_seed(100 * batch + length)
    return (
        torch.randn(batch, length, 4),
        torch.randint(10, (batch, length)),
        torch.rand(batch, length) > 0.5,
        torch.tensor(0.5 + batch),
        torch.randn(batch, length).bfloat16(),
    )


def global_state() -> dict[str, Any]:
    from torch._dynamo import config as dynamo_config  # noqa: PLC0415
    from torch._inductor import config as inductor_config  # noqa: PLC0415

    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch")]
    return {
        "dynamo": copy.deepcopy(dynamo_config.get_config_copy()),
        "inductor": copy.deepcopy(inductor_config.get_config_copy()),
        "default dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warnings": list(warnings.filters),
        "levels": {name: logging.getLogger(name).level for name in names},
        "filters": [list(handler.filters) for handler in logging.getLogger("torch").handlers],
        "random": torch.get_rng_state().tolist(),
    }


@attrs.frozen
class Tuned:
    """A module tuned with Inductor, and what the tuning did besides."""

    net: Wide
    model: ait.Module
    report: TuneReport
    before: dict[str, Any]
    after: dict[str, Any]
    users_compilations: int


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    net = Wide().eval()
    batch, length = ait.BatchDim(0, 9), ait.DynamicDim("length", 1, 12)
    axes = {0: batch, 1: length}
    shapes = dict.fromkeys(("x", "ids", "mask", "half"), axes)
    model = ait.Module(
        net, "wide", strategy=ait.OneBackendStrategy("inductor"), dynamic_shapes=shapes
    )
    calls = [wide_inputs(2, 5), wide_inputs(3, 7)]
    compilations: list[object] = []

    def users_backend(graph: torch.fx.GraphModule, _: object) -> Any:
        compilations.append(graph)
        return graph.forward

    users = torch.compile(lambda x: x + 1, backend=users_backend, dynamic=False)
    users(torch.ones(3))
    before = global_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_stopwatch, "_PAUSE_SECONDS", 0.0)
        patch.setattr(_measurement, "_BUDGET_SECONDS", 0.0)
        report = ait.tune(model, calls, device="cpu", registry=empty_registry())
    after = global_state()
    users(torch.ones(3))
    return Tuned(net, model, report, before, after, len(compilations))


def compilations() -> dict[str, int]:
    """What PyTorch counted of compiling so far."""
    from torch._dynamo.utils import counters  # noqa: PLC0415

    return {
        f"{kind}.{name}": count
        for kind in ("frames", "stats", "inductor", "aot_autograd")
        for name, count in counters[kind].items()
    }


@pytest.mark.parametrize(
    ("batch", "length"), [(2, 5), (3, 7), (0, 5), (1, 1), (9, 12), (4, 1), (1, 8), (7, 11)]
)
def test_new_sizes_in_the_ranges_are_right_and_compile_nothing(
    tuned: Tuned, batch: int, length: int
) -> None:
    inputs = wide_inputs(batch, length)
    before = compilations()
    with torch.compiler.set_stance("fail_on_recompile"):
        got = tuned.model(*inputs)
    assert compilations() == before
    with torch.no_grad():
        expected = tuned.net(*inputs)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value)
        assert got[name].dtype is value.dtype


def test_the_report_tells_of_the_compilation(tuned: Tuned) -> None:
    (graph,) = tuned.report.modules[0].graphs
    assert graph.winner == "inductor"
    assert graph.conditions == ()
    (candidate,) = graph.candidates
    assert candidate.options == {"mode": "default", "options": {}}
    assert [attempt.step for attempt in candidate.attempts] == [
        "export, then compile in mode 'default'"
    ]


def test_strided_inputs_are_taken_and_no_input_is_written_to(tuned: Tuned) -> None:
    inputs = wide_inputs(3, 6)
    strided = [
        torch.stack((tensor, tensor), -1)[..., 0] if tensor.dim() else tensor for tensor in inputs
    ]
    turned = [strided[0].mT.contiguous().mT, *strided[1:]]
    copies = [tensor.clone() for tensor in turned]
    engine = graphs_of(tuned.model)[0].engine
    for one, other in zip(engine(turned), engine(inputs), strict=True):
        assert torch.equal(one, other)
    assert all(map(torch.equal, turned, copies))


def test_results_are_the_callers_own(tuned: Tuned) -> None:
    inputs = wide_inputs(2, 5)
    copies = [tensor.clone() for tensor in inputs]
    expected = {name: value.clone() for name, value in tuned.model(*inputs).items()}
    for name, value in tuned.model(*inputs).items():
        result = tuned.model(*inputs)
        value.zero_()
        for other in result:
            assert torch.equal(result[other], expected[other]), (name, other)
    first = tuned.model(*inputs)
    for value in first.values():
        value.zero_()
    again = tuned.model(*inputs)
    assert all(torch.equal(again[name], expected[name]) for name in expected)
    assert all(map(torch.equal, inputs, copies))


def test_results_do_not_share_memory_with_one_another(tuned: Tuned) -> None:
    results = tuned.model(*wide_inputs(2, 5))
    addresses = [value.untyped_storage().data_ptr() for value in results.values()]
    assert len(set(addresses)) == len(addresses)


def test_modes_of_the_caller_change_nothing_and_compile_nothing(tuned: Tuned) -> None:
    engine = graphs_of(tuned.model)[0].engine
    inputs = wide_inputs(2, 5)
    expected = engine(inputs)
    before, threads = compilations(), torch.get_num_threads()
    torch.use_deterministic_algorithms(mode=True)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.enable_grad(), torch.autocast("cpu"), torch.device("meta"):
            results = engine([inputs[0].requires_grad_(), *inputs[1:]])
        with torch.inference_mode():
            inferred = engine(inputs)
    finally:
        torch.use_deterministic_algorithms(mode=False)
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
    assert compilations() == before
    assert not any(result.requires_grad for result in results)
    assert all(map(torch.equal, results, expected))
    assert all(map(torch.equal, inferred, expected))


def test_threads_with_other_shapes_get_their_own_results(tuned: Tuned) -> None:
    cases = [
        (inputs, tuned.model(*inputs)) for inputs in map(wide_inputs, range(1, 9), range(8, 0, -1))
    ]
    before, wrong = compilations(), []

    def call(position: int) -> None:
        for turn in range(40):
            inputs, expected = cases[(position + turn) % len(cases)]
            got = tuned.model(*inputs)
            if not all(torch.equal(got[name], expected[name]) for name in expected):
                wrong.append((position, turn))

    threads = [threading.Thread(target=call, args=(position,)) for position in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert compilations() == before


def test_building_changes_no_state_of_the_process(tuned: Tuned) -> None:
    before, after = dict(tuned.before), dict(tuned.after)
    levels = after.pop("levels")
    assert {name: levels[name] for name in before["levels"]} == before.pop("levels")
    for name, value in before.items():
        assert after[name] == value, name
    assert tuned.users_compilations == 1


def test_sizes_outside_of_the_ranges_are_refused(tuned: Tuned) -> None:
    engine = graphs_of(tuned.model)[0].engine
    with pytest.raises(InputMismatchError):
        engine(wide_inputs(10, 5))


def test_compiled_code_is_stored_in_no_checkpoint(tuned: Tuned, tmp_path: Path) -> None:
    path = tmp_path / "model.ait"
    with pytest.raises(CheckpointError, match="native code"):
        ait.save(tuned.model, path, registry=empty_registry())
    assert not path.exists()
    spec = graphs_of(tuned.model)[0].engine.graph
    with pytest.raises(CheckpointError, match="tune the module again"):
        InductorBackend().load(None, spec, CPU)  # type: ignore[arg-type]


def test_branch_on_a_size_limits_the_sizes() -> None:
    def branch(x: Tensor) -> Tensor:
        return x * 3 if x.shape[0] % 4 == 0 else x * 2

    outcome = outcome_of(branch, (torch.ones(4, 2),), (torch.ones(16, 2),))
    engine = engine_of(outcome)
    assert [str(condition) for condition in engine.graph.conditions] == ["batch % 4 == 0"]
    assert outcome.attempts[0].detail == "takes sizes with batch % 4 == 0"
    assert torch.equal(engine((torch.ones(8, 2),))[0], torch.full((8, 2), 3.0))
    with pytest.raises(InputMismatchError):
        engine((torch.ones(9, 2),))


def test_declared_range_that_is_not_served_whole_is_refused() -> None:
    def branch(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] <= 10 else x * 3

    shapes = {"x": {0: ait.BatchDim(1, 20)}}
    outcome = outcome_of(branch, (torch.ones(4, 2),), dynamic_shapes=shapes)
    assert isinstance(outcome.error, ValidationError)
    assert outcome.error.kind == "sizes"


@pytest.mark.parametrize(
    ("function", "telling"),
    [
        (lambda x: x * 2 if x.sum() > 0 else x * 3, "data-dependent"),
        (lambda x: torch.from_numpy(x.numpy() * 2), "numpy"),
        (lambda x: x * (2 if x[0, 0].item() > 0 else 3), "data-dependent"),
    ],
)
def test_code_that_needs_values_is_a_build_error_that_says_so(
    function: Any, telling: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    outcome = outcome_of(function, (torch.ones(2, 4),))
    assert isinstance(outcome.error, BuildError)
    assert (outcome.error.backend_name, outcome.error.step) == ("inductor", "export")
    assert outcome.error.__cause__ is not None
    assert telling in str(outcome.error)
    assert len(str(outcome.error)) < 800
    assert capfd.readouterr() == ("", "")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_failure_of_the_compiler_names_the_step_and_keeps_the_first_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compile_nothing(*_: object) -> None:
        raise RuntimeError("\n".join(f"line {number}" for number in range(300)))

    monkeypatch.setattr(torch._inductor, "compile", compile_nothing)
    outcome = outcome_of(mlp(), (torch.ones(2, 4),))
    assert isinstance(outcome.error, BuildError)
    assert outcome.error.step == "compile"
    assert "RuntimeError: line 0 line 1 line 2;" in str(outcome.error)
    assert "line 299" in str(outcome.error.__cause__)


def test_weights_are_no_inputs_that_a_cuda_graph_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    with quiet_compilers():  # PyTorch warns of itself at the first import
        from torch._inductor import compile_fx, config  # noqa: PLC0415

    found: list[list[int]] = []
    real = compile_fx.get_static_input_idxs

    def looked_at(fixed: int) -> list[int]:
        found.append(real(fixed))
        return found[-1]

    monkeypatch.setattr(compile_fx, "get_static_input_idxs", looked_at)
    with config.patch(force_disable_caches=True):
        engine_of(outcome_of(mlp(), (torch.ones(2, 4),), (torch.ones(3, 4),)))
    assert found == [[0, 1, 2, 3]]


def test_closed_engine_refuses_and_lets_weights_and_code_go() -> None:
    net = Affine()
    weight = weakref.ref(net.scale)
    engine = engine_of(outcome_of(net, (torch.ones(2, 4),), (torch.ones(3, 4),)))
    code = weakref.ref(engine._run)
    del net
    engine.close()
    gc.collect()
    assert weight() is None
    assert code() is None
    with pytest.raises(EngineClosedError) as caught:
        engine((torch.ones(2, 4),))
    assert (caught.value.backend_name, caught.value.operation) == ("inductor", "run")


def test_engine_keeps_its_weights_where_the_module_lets_them_go() -> None:
    net = Affine()
    engine = engine_of(outcome_of(net, (torch.ones(2, 4),), (torch.ones(3, 4),)))
    net.to("meta")
    assert torch.equal(engine((torch.ones(2, 4),))[0], torch.full((2, 4), 5.0))


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_and_options_reach_the_compiler(mode: str) -> None:
    backend = empty_registry().backend("inductor", mode=mode, options={"max_fusion_size": 8})
    assert isinstance(backend, InductorBackend)
    options = backend.config.inductor_options
    assert options["max_fusion_size"] == 8
    assert options.keys() > {"max_fusion_size"}
    net = mlp()
    engine = engine_of(outcome_of(net, (torch.ones(2, 4),), backend=backend))
    with torch.no_grad():
        torch.testing.assert_close(engine((torch.ones(2, 4),))[0], net(torch.ones(2, 4)))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"mode": "fast"}, "mode"),
        ({"mode": None}, "mode"),
        ({"options": [1]}, "options"),
        ({"options": {1: 2}}, "options"),
        ({"options": {"no_such_option": True}}, "options"),
        ({"options": {"max_fusion_size": "8"}}, "options"),
        ({"options": {"max_fusion_size": object()}}, "options"),
        ({"options": {"freezing": True}}, "options"),
        ({"fullgraph": True}, "fullgraph"),
    ],
)
def test_settings_that_cannot_be_used_are_config_errors(
    options: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        empty_registry().backend("inductor", **options)
    assert caught.value.field == field


def test_configuration_keeps_what_it_was_given() -> None:
    options = {"max_fusion_size": 8}
    config = InductorConfig(options=options)
    options["max_fusion_size"] = 9
    assert config.to_options() == {"mode": "default", "options": {"max_fusion_size": 8}}
    assert InductorConfig.from_options(config.to_options()) == config
    assert hash(config) == hash(InductorConfig.from_options(config.to_options()))


def test_missing_compiler_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config, cpp_builder  # noqa: PLC0415

    InductorBackend().check_available(CPU)
    search = getattr(cpp_builder, "cpp_compiler_search")  # noqa: B009
    search.cache_clear()
    with monkeypatch.context() as patch, config.patch({"cpp.cxx": ("no-such-compiler",)}):
        patch.setenv("PATH", "/nowhere")
        with pytest.raises(BackendUnavailableError) as caught:
            InductorBackend().check_available(CPU)
    search.cache_clear()
    assert (caught.value.backend_name, caught.value.missing) == ("inductor", "a C++ compiler")
    assert "apt-get install g++" in str(caught.value.install_hint)


@pytest.mark.parametrize("device", ["meta", "mps", "xpu:1"])
def test_devices_without_a_compiler_are_unavailable(device: str) -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        InductorBackend().check_available(torch.device(device))
    assert caught.value.missing == device


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_absent_cuda_device_is_unavailable() -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        InductorBackend().check_available(torch.device("cuda", 0))
    assert caught.value.missing == "cuda:0"


def test_cuda_without_triton_or_with_an_old_device_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (6, 1))
    for installed, missing in ((False, "triton"), (True, "compute capability 7.0")):
        monkeypatch.setattr("torch.utils._triton.has_triton_package", lambda is_=installed: is_)
        with pytest.raises(BackendUnavailableError) as caught:
            InductorBackend().check_available(device)
        assert caught.value.missing == missing
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    InductorBackend().check_available(device)


def test_cuda_graphs_of_an_engine_are_apart_from_those_of_the_thread() -> None:
    with quiet_compilers():
        cudagraph_trees = importlib.import_module("torch._inductor.cudagraph_trees")
    runs = CudaGraphRuns(None, torch.device("cuda", 0))  # type: ignore[arg-type]
    local = cudagraph_trees.local
    before = dict(vars(local))
    with runs._own_graphs():
        assert local.tree_manager_containers is runs._graphs["tree_manager_containers"]
        assert local.tree_manager_locks is runs._graphs["tree_manager_locks"]
    assert vars(local) == before

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_plugin import empty_registry, registry
from fakes import AffineBackend, FakeBackend, FakeEngine, Fault
from samples import Affine, Function, batches, engine_of, graphs_of, mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from aitune_core import (
    BackendUnavailableError,
    BatchDim,
    BuildError,
    BuildRequest,
    ConfigError,
    Decision,
    Engine,
    FirstWinsStrategy,
    Module,
    OneBackendStrategy,
    PluginRegistry,
    RecordingError,
    Strategy,
    Trial,
    TuneReport,
    TuningError,
    UnknownBackendError,
    UnknownStrategyError,
    hookimpl,
    tune,
)
from aitune_core._inductor import InductorBackend
from aitune_core._module import state_of

X = torch.ones(2, 4)


def wrapped(module: nn.Module | None = None, name: str = "net", **options: Any) -> Module:
    options.setdefault("strategy", OneBackendStrategy(FakeBackend()))
    return Module(mlp() if module is None else module, name, **options)


def tune_on_cpu(func: Any, data: Any = X, **options: Any) -> TuneReport:
    options.setdefault("registry", empty_registry())
    return tune(func, data, device="cpu", **options)


def generated() -> Iterator[Tensor]:
    yield from batches(2, 3)


@pytest.mark.parametrize(
    ("data", "samples", "batch"),
    [
        (X, 1, "2"),
        ((X,), 1, "2"),
        ({"input": X}, 1, "2"),
        (((), {"input": X}), 1, "2"),
        ([X, torch.ones(5, 4)], 2, "batch[2..5]"),
        ([(X,), {"input": torch.ones(5, 4)}], 2, "batch[2..5]"),
        (generated(), 2, "batch[2..3]"),
        (DataLoader(TensorDataset(torch.randn(5, 4)), batch_size=2), 3, "batch[1..2]"),
    ],
)
def test_input_data_in_every_form(data: Any, samples: int, batch: str) -> None:
    model = wrapped()
    (module,) = tune_on_cpu(model, data).modules
    (graph,) = module.graphs
    assert graph.samples == samples
    assert graph.inputs == (f"input: float32({batch}, 4) on cpu",)
    assert module.tuned
    assert len(graphs_of(model)) == 1


def test_batch_sizes_make_further_calls() -> None:
    model = wrapped()
    (module,) = tune_on_cpu(model, X, batch_sizes=[1, 8]).modules
    assert (module.graphs[0].samples, module.graphs[0].dims) == (3, ("batch[1..8]",))
    runs = engine_of(model).runs
    model(torch.ones(5, 4))
    assert engine_of(model).runs == runs + 1


def test_max_calls_bounds_an_endless_source() -> None:
    def endless() -> Iterator[Tensor]:
        while True:
            yield X

    (module,) = tune_on_cpu(wrapped(), endless(), max_calls=3).modules
    assert module.graphs[0].samples == 3


def test_max_calls_may_be_any_whole_number() -> None:
    (module,) = tune_on_cpu(wrapped(), batches(2, 3), max_calls=2**70).modules
    assert module.graphs[0].samples == 2


def test_dry_run_records_and_changes_nothing(cache_dir: Path) -> None:
    backend = FakeBackend()
    model = wrapped(strategy=OneBackendStrategy(backend))
    report = tune_on_cpu(model, batches(2, 3), dry_run=True)
    assert report.dry_run
    (module,) = report.modules
    assert not module.tuned
    assert [(graph.samples, graph.dims) for graph in module.graphs] == [(2, ("batch[2..3]",))]
    assert [graph.winner for graph in module.graphs] == [None]
    assert backend.requests == []
    assert graphs_of(model) == ()
    assert not cache_dir.exists() or not any(cache_dir.iterdir())


@pytest.mark.parametrize("data", [[], iter(())])
def test_no_calls_is_an_error(data: Any) -> None:
    with pytest.raises(RecordingError):
        tune_on_cpu(wrapped(), data)


def test_calls_that_reach_no_wrapped_module_are_an_error() -> None:
    with pytest.raises(RecordingError):
        tune_on_cpu(lambda x: x, X)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"device": "gpu"}, "device"),
        ({"device": "meta"}, "device"),
        ({"device": 1.5}, "device"),
        ({"device": "cuda:99"}, "device"),
        ({"device": 2**70}, "device"),
        ({"batch_sizes": [0]}, "batch_sizes"),
        ({"batch_sizes": 8}, "batch_sizes"),
        ({"batch_sizes": "8"}, "batch_sizes"),
        ({"batch_sizes": [True]}, "batch_sizes"),
        ({"batch_sizes": [2.0]}, "batch_sizes"),
        ({"max_calls": 0}, "max_calls"),
        ({"max_calls": "3"}, "max_calls"),
        ({"on_failure": "ignore"}, "on_failure"),
    ],
)
def test_arguments_are_checked_before_the_module_runs(options: dict[str, Any], field: str) -> None:
    calls: list[Tensor] = []
    model = wrapped(Function(lambda x: calls.append(x)))
    with pytest.raises(ConfigError) as caught:
        tune(model, X, registry=empty_registry(), **options)
    assert caught.value.field == field
    assert calls == []


@pytest.mark.parametrize("func", [None, 3, "net"])
def test_func_must_be_callable(func: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        tune_on_cpu(func)
    assert caught.value.field == "func"


def test_names_are_resolved_before_the_module_runs() -> None:
    calls: list[Tensor] = []
    for strategy, error in [
        ("no_such", UnknownStrategyError),
        (OneBackendStrategy("no_such"), UnknownBackendError),
        (OneBackendStrategy(("fake", {"nonsense": 1})), ConfigError),
    ]:
        model = Module(Function(lambda x: calls.append(x)), strategy=strategy)  # type: ignore[arg-type]
        with pytest.raises(error):
            tune_on_cpu(model, registry=registry())
    assert calls == []


def test_strategy_of_the_call_is_resolved_before_a_pipeline_runs() -> None:
    calls: list[Tensor] = []
    with pytest.raises(UnknownStrategyError, match="did you mean 'first_wins'"):
        tune_on_cpu(calls.append, strategy="fist_wins")
    assert calls == []


def test_modules_of_one_name_are_numbered_in_the_report() -> None:
    first, second, other = wrapped(name="net"), wrapped(name="net"), wrapped(name="other")
    report = tune_on_cpu(lambda x: (first(x), second(x), other(x)))
    assert [module.name for module in report.modules] == ["net", "net (2)", "other"]
    assert any("'net' of another module" in note for note in report.modules[1].notes)


def test_without_any_backend_that_runs_here_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_compiler(self: InductorBackend, device: torch.device) -> None:
        msg = "no compiler"
        raise BackendUnavailableError(msg, install_hint="install one")

    monkeypatch.setattr(InductorBackend, "check_available", no_compiler)
    with pytest.raises(TuningError) as caught:
        tune_on_cpu(Module(mlp()))
    (error,) = caught.value.exceptions
    assert isinstance(error, BackendUnavailableError)
    assert error.install_hint == "install one"


def test_strategy_of_the_call_is_for_modules_without_one() -> None:
    own, given = FakeBackend(label="own"), FakeBackend(label="given")
    first = wrapped(strategy=OneBackendStrategy(own), name="first")
    second = Module(mlp(), "second")
    tune_on_cpu(lambda x: (first(x), second(x)), strategy=OneBackendStrategy(given))
    assert graphs_of(first)[0].backend is own
    assert graphs_of(second)[0].backend is given


def test_strategies_and_backends_by_name_come_from_the_registry() -> None:
    model = Module(Affine().eval(), strategy=FirstWinsStrategy(["affine"], allow_slower=True))
    report = tune_on_cpu(model, registry=registry())
    assert report.modules[0].strategy == "first_wins"
    assert isinstance(graphs_of(model)[0].backend, AffineBackend)
    other = Module(Affine().eval(), strategy=OneBackendStrategy(("fake", {"label": "z"})))
    tune_on_cpu(other, registry=registry())
    assert graphs_of(other)[0].backend == FakeBackend(label="z")


def test_module_in_training_mode_is_put_into_eval_mode_and_the_report_says_so() -> None:
    net = mlp(dropout=0.5).train()
    model = wrapped(net)
    (module,) = tune_on_cpu(model).modules
    assert not any(part.training for part in net.modules())
    assert any("eval mode" in note for note in module.notes)
    assert len(graphs_of(model)) == 1


def test_flags_of_parts_of_an_eval_module_are_left_alone() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if self.training else x

    net = nn.Sequential(nn.Linear(4, 4), Noise()).eval()
    net[1].training = True
    model = wrapped(net)
    (module,) = tune_on_cpu(model).modules
    assert module.notes == ()
    assert net[1].training
    assert not net.training
    assert torch.allclose(model(X), net[0](X) + 1)


def test_tuning_again_replaces_the_graphs() -> None:
    model = wrapped()
    tune_on_cpu(model, X)
    old = engine_of(model)
    tune_on_cpu(model, batches(1, 3))
    assert engine_of(model) is not old
    assert model(torch.ones(3, 4)).shape == (3, 3)


def test_losing_candidates_are_closed() -> None:
    class Second(Strategy):
        name = "second"

        def decide(self, trial: Trial) -> Decision:
            outcomes = [trial.evaluate(backend) for backend in trial.backends]
            return Decision(outcomes[1], "second")

    first, second = FakeBackend(label="1"), FakeBackend(label="2")
    model = wrapped(strategy=Second([first, second]))
    tune_on_cpu(model)
    assert [engine.releases for engine in first.built] == [1]
    assert [engine.releases for engine in second.built] == [0]


def test_samples_are_not_modified_by_tuning() -> None:
    data = batches(2, 3)
    copies = [x.clone() for x in data]
    strategy = FirstWinsStrategy(
        [FakeBackend(fault=Fault.WRITES), FakeBackend()], allow_slower=True
    )
    model = wrapped(strategy=strategy)
    tune_on_cpu(model, data)
    assert all(torch.equal(x, copy) for x, copy in zip(data, copies, strict=True))
    assert not any(x.requires_grad for x in data)


def test_module_that_changes_its_input_is_tuned_with_the_inputs_of_the_call() -> None:
    model = wrapped(Function(lambda x: x.add_(1)).eval())
    tune_on_cpu(model, [torch.zeros(2)])
    assert engine_of(model).graph.mutated_inputs == (0,)
    x = torch.full((2,), 5.0)
    assert model(x).tolist() == [6.0, 6.0]
    assert x.tolist() == [6.0, 6.0]


def test_work_folders_go_with_the_engines(cache_dir: Path) -> None:
    def run() -> None:
        model = wrapped(Affine().eval(), strategy=OneBackendStrategy(AffineBackend()))
        tune_on_cpu(model)
        assert [path.name for path in (cache_dir / "affine").rglob("*.bin")] == ["values.bin"]

    run()
    gc.collect()
    assert list((cache_dir / "affine").iterdir()) == []


def observed(events: list[tuple[Any, ...]]) -> PluginRegistry:
    @hookimpl
    def aitune_candidate_started(module_name: str, graph: Any, backend: Any) -> None:
        events.append(("started", module_name, graph.name, backend.name))

    @hookimpl
    def aitune_candidate_finished(module_name: str, graph: Any, outcome: Any) -> None:
        events.append(("finished", module_name, graph.name, outcome.succeeded))

    @hookimpl
    def aitune_tuning_finished(report: Any) -> None:
        events.append(("report", report))

    plugin = SimpleNamespace(
        AITUNE_API_VERSION=1,
        aitune_candidate_started=aitune_candidate_started,
        aitune_candidate_finished=aitune_candidate_finished,
        aitune_tuning_finished=aitune_tuning_finished,
    )

    class Ready(metadata.EntryPoint):
        def load(self) -> Any:
            return plugin

    return PluginRegistry([Ready("watch", "watch", "aitune")])


def test_observers_see_every_candidate_and_the_report() -> None:
    events: list[tuple[Any, ...]] = []
    strategy = FirstWinsStrategy([FakeBackend(fault=Fault.ZEROS), FakeBackend()], allow_slower=True)
    report = tune_on_cpu(wrapped(strategy=strategy), registry=observed(events))
    assert events[:-1] == [
        ("started", "net", "graph_0", "fake"),
        ("finished", "net", "graph_0", False),
        ("started", "net", "graph_0", "fake"),
        ("finished", "net", "graph_0", True),
    ]
    assert events[-1][0] == "report"
    assert events[-1][1] is report


def test_progress_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "aitune_core"):
        tune_on_cpu(wrapped())
    assert any("net" in message and "correct" in message for message in caplog.messages)


def test_numbers_that_cannot_be_inputs_get_a_graph_per_value() -> None:
    class NoNumbers(FakeBackend):
        def build(self, request: BuildRequest) -> Engine:
            if len(request.graph.inputs) > 1:
                msg = "numbers must be constants"
                raise BuildError(msg)
            return super().build(request)

    net = Function(lambda x, scale: x * scale).eval()
    model = wrapped(net, strategy=OneBackendStrategy(NoNumbers()))
    (module,) = tune_on_cpu(model, [(X, 2.0), (X, 3.0)]).modules
    assert [graph.winner for graph in module.graphs] == [None, "fake", "fake"]
    assert any("'scale'" in note for note in module.notes)
    assert len(graphs_of(model)) == 2
    assert torch.equal(model(X, 3.0), X * 3)


def test_many_values_of_such_a_number_stay_eager() -> None:
    strategy = OneBackendStrategy(FakeBackend(fault=Fault.BUILD))
    model = wrapped(Function(lambda x, n: x * n).eval(), strategy=strategy)
    report = tune_on_cpu(model, [(X, float(n)) for n in range(20)], on_failure="eager")
    (module,) = report.modules
    assert len(module.graphs) == 1
    assert any("20 values" in note for note in module.notes)
    assert graphs_of(model) == ()


def test_declared_range_is_tuned_beyond_the_recorded_sizes() -> None:
    model = wrapped(dynamic_shapes={"input": {0: BatchDim(1, 64)}})
    (module,) = tune_on_cpu(model).modules
    assert module.graphs[0].dims == ("batch[1..64]",)
    runs = engine_of(model).runs
    model(torch.ones(64, 4))
    assert engine_of(model).runs == runs + 1


def test_unused_dynamic_shapes_are_an_error_that_changes_nothing() -> None:
    model = wrapped(dynamic_shapes={"inputs": {0: BatchDim(1, 64)}})
    with pytest.raises(ConfigError) as caught:
        tune_on_cpu(model)
    assert (caught.value.value, caught.value.allowed) == ("inputs", ("input",))
    assert state_of(model).dispatcher is None


def test_report_says_where_and_how_long() -> None:
    report = tune_on_cpu(wrapped())
    assert report.device == "cpu"
    assert report.seconds > 0.0
    assert report.environment.torch == torch.__version__


def test_pipeline_is_tuned_where_its_modules_are_called() -> None:
    model = wrapped()
    report = tune(lambda x: model(x), X, registry=empty_registry())
    assert report.device == "cpu"
    assert isinstance(graphs_of(model)[0].engine, FakeEngine)


def test_keyword_results_keep_their_types() -> None:
    model = wrapped(Function(lambda x: OrderedDict(a=x * 2, b=None)).eval())
    tune_on_cpu(model)
    result = model(X)
    assert type(result) is OrderedDict
    assert list(result) == ["a", "b"]

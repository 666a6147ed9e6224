from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_plugin import empty_registry
from fakes import FakeBackend, Fault
from samples import Function, engine_of, graphs_of, mlp
from torch import Tensor, nn

from aitune_core import (
    BuildError,
    BuildRequest,
    CandidateRejectedError,
    Decision,
    Engine,
    FirstWinsStrategy,
    Module,
    OneBackendStrategy,
    RecordingError,
    Strategy,
    Trial,
    TuneReport,
    TuningError,
    ValidationError,
    tune,
)

X = torch.ones(2, 4)


def wrapped(module: nn.Module | None = None, name: str = "net", **options: Any) -> Module:
    options.setdefault("strategy", OneBackendStrategy(FakeBackend()))
    return Module(mlp() if module is None else module, name, **options)


def tune_on_cpu(func: Any, data: Any = X, **options: Any) -> TuneReport:
    options.setdefault("registry", empty_registry())
    return tune(func, data, device="cpu", **options)


def test_random_module_is_refused_and_the_module_named() -> None:
    with pytest.raises(RecordingError) as caught:
        tune_on_cpu(wrapped(Function(lambda x: x + torch.rand(4))))
    assert caught.value.module_name == "net"


def test_tuning_error_holds_one_error_per_failed_candidate() -> None:
    strategy = FirstWinsStrategy(
        [FakeBackend(fault=Fault.BUILD), FakeBackend(fault=Fault.ZEROS)], allow_slower=True
    )
    with pytest.raises(TuningError) as caught:
        tune_on_cpu(wrapped(strategy=strategy))
    assert [type(error) for error in caught.value.exceptions] == [BuildError, ValidationError]


def test_slower_candidates_alone_are_a_tuning_error_too() -> None:
    class Never(Strategy):
        name = "never"

        def decide(self, trial: Trial) -> Decision:
            outcome = trial.evaluate(trial.backends[0])
            assert outcome.succeeded
            return Decision(None, "too slow")

    backend = FakeBackend()
    with pytest.raises(TuningError) as caught:
        tune_on_cpu(wrapped(strategy=Never([backend])))
    (error,) = caught.value.exceptions
    assert isinstance(error, CandidateRejectedError)
    assert str(error) == "fake is correct, but too slow"
    assert (error.backend_name, error.rule) == ("fake", "slower")
    assert error.got is not None
    assert [engine.releases for engine in backend.built] == [1]


def test_on_failure_eager_keeps_eager_and_reports_why() -> None:
    model = wrapped(strategy=OneBackendStrategy(FakeBackend(fault=Fault.ZEROS)))
    (module,) = tune_on_cpu(model, on_failure="eager").modules
    assert not module.tuned
    (graph,) = module.graphs
    assert graph.winner is None
    assert "fake failed" in graph.reason
    assert graph.candidates[0].error is not None
    assert "ValidationError" in graph.candidates[0].error
    assert graphs_of(model) == ()
    assert model(X).shape == (2, 3)


def test_on_failure_eager_reports_modules_that_cannot_be_recorded() -> None:
    good = wrapped(name="good")
    bad = wrapped(Function(lambda x: object()), name="bad")
    random = wrapped(Function(lambda x: x + torch.rand(4)), name="random")
    report = tune_on_cpu(lambda x: (good(x), bad(x), random(x)), on_failure="eager")
    assert [(module.name, module.tuned) for module in report.modules] == [
        ("good", True),
        ("bad", False),
        ("random", False),
    ]
    assert any("stays eager" in note for note in report.modules[1].notes)
    assert "different results" in report.modules[2].graphs[0].reason


def failing_for_second_graph() -> tuple[Module, FakeBackend]:
    class Fails(FakeBackend):
        def build(self, request: BuildRequest) -> Engine:
            if len(request.graph.inputs) == 2:
                msg = "no second graph"
                raise BuildError(msg)
            return super().build(request)

    backend = Fails()
    net = Function(lambda x, y=None: x * 2 if y is None else x + y).eval()
    return wrapped(net, strategy=OneBackendStrategy(backend)), backend


def test_failure_in_a_later_graph_closes_engines_and_leaves_earlier_tuning_intact() -> None:
    model, backend = failing_for_second_graph()
    tune_on_cpu(model, X)
    engine = engine_of(model)
    with pytest.raises(TuningError):
        tune_on_cpu(model, [(X,), (X, X)])
    assert [each.releases for each in backend.built] == [0, 1]
    assert engine_of(model) is engine
    assert not engine.closed
    runs = engine.runs
    assert torch.equal(model(X), X * 2)
    assert engine.runs == runs + 1


def test_failure_in_a_later_module_leaves_the_earlier_untuned() -> None:
    first = wrapped(name="first")
    second = wrapped(name="second", strategy=OneBackendStrategy(FakeBackend(fault=Fault.COUNT)))
    with pytest.raises(TuningError):
        tune_on_cpu(lambda x: (first(x), second(x)))
    assert graphs_of(first) == ()


def test_on_failure_eager_tunes_the_graphs_that_work() -> None:
    model, _ = failing_for_second_graph()
    (module,) = tune_on_cpu(model, [(X,), (X, X)], on_failure="eager").modules
    assert [graph.winner for graph in module.graphs] == ["fake", None]
    assert len(graphs_of(model)) == 1


@pytest.mark.parametrize("how", ["fails", "dry run"])
def test_modes_are_what_they_were_where_nothing_was_tuned(how: str) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    net[1].eval()
    liar = FakeBackend(fault=Fault.ZEROS)
    model = Module(net, "net", strategy=FirstWinsStrategy([liar]))
    if how == "fails":
        with pytest.raises(TuningError):
            tune_on_cpu(model, [torch.randn(2, 4)])
    else:
        tune_on_cpu(model, [torch.randn(2, 4)], dry_run=True)
    assert [part.training for part in net.modules()] == [True, True, False]


def test_tensors_that_forward_changes_are_the_users_again_after_tuning() -> None:
    def forward(x: Tensor) -> Tensor:
        return x.mul_(2)

    samples = [torch.ones(2, 4), torch.ones(3, 4).t().contiguous().t()]
    tune_on_cpu(wrapped(Function(forward)), samples, batch_sizes=[4], on_failure="eager")
    assert all(bool((sample == 1).all()) for sample in samples)


def test_error_of_the_module_is_the_users() -> None:
    def forward(x: Tensor) -> Tensor:
        msg = "mine"
        raise KeyError(msg)

    with pytest.raises(KeyError, match="mine") as caught:
        tune_on_cpu(wrapped(Function(forward)))
    (note,) = caught.value.__notes__
    assert note.startswith("in call 1 of input_data, taken as (Tensor); a call is")
    assert torch.is_grad_enabled()
    model = wrapped()
    tune_on_cpu(model)
    runs = engine_of(model).runs
    model(X)
    assert engine_of(model).runs == runs + 1, "no recorder is left behind"

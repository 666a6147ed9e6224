"""A wrapped module among the things that PyTorch code does with modules."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_plugin import empty_registry
from fakes import FakeBackend
from samples import Affine, batches, engine_of, graphs_of, mlp, tuned
from torch import Tensor, nn

from aitune_core import (
    ConfigError,
    MissWarning,
    Module,
    OneBackendStrategy,
    TuneReport,
    _measurement,
    _stopwatch,
    tune,
)
from aitune_core._module import state_of

X = torch.ones(2, 4)


@pytest.fixture(autouse=True)
def quick_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stopwatch, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(_measurement, "_BUDGET_SECONDS", 0.0)
    monkeypatch.setattr(_measurement, "_LOOKS", (2, 4))


def wrapped(module: nn.Module, name: str | None = None, **options: Any) -> Module:
    return Module(module, name, strategy=OneBackendStrategy(FakeBackend()), **options)


def tune_all(func: Callable[..., Any], data: Any) -> TuneReport:
    return tune(func, data, registry=empty_registry())


def hooked(model: nn.Module) -> list[str]:
    log: list[str] = []
    model.register_forward_pre_hook(lambda _module, _args: log.append("pre"))
    model.register_forward_pre_hook(
        lambda _module, _args, _kwargs: log.append("pre with kwargs"), with_kwargs=True
    )
    model.register_forward_hook(lambda _module, _args, _output: log.append("post"))
    model.register_forward_hook(
        lambda _module, _args, _kwargs, _output: log.append("post with kwargs"), with_kwargs=True
    )
    return log


ONCE = ["pre", "pre with kwargs", "post", "post with kwargs"]


def test_hooks_run_once_per_call_tuned_and_eager() -> None:
    model = tuned(Affine(), batches(2))
    log = hooked(model)
    runs = engine_of(model).runs
    model(X)
    assert log == ONCE
    assert engine_of(model).runs == runs + 1
    log.clear()
    with pytest.warns(MissWarning):
        model(torch.ones(4))
    assert log == ONCE
    log.clear()
    model.train()
    model(x=X)
    assert log == ONCE


def test_hooks_registered_before_wrapping_run_once_and_not_while_trying_candidates() -> None:
    net = Affine()
    log = hooked(net)
    model = wrapped(net.eval())
    tune(model, [X, X], device="cpu", registry=empty_registry())
    assert log == ONCE * 2
    log.clear()
    model(X)
    assert log == ONCE


def test_hooks_can_change_arguments_and_results() -> None:
    model = tuned(Affine(), batches(2))
    model.register_forward_pre_hook(lambda _module, args: (args[0] * 10,))
    model.register_forward_hook(lambda _module, _args, output: output + 1)
    assert torch.equal(model(X), 2 * 10 * X + 3 + 1)


def test_forward_can_be_replaced_and_still_reaches_the_engine() -> None:
    model: Any = tuned(Affine(), batches(2))
    old = model.forward
    calls: list[str] = []

    def replacement(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        assert module is model
        calls.append("before")
        result = old(*args, **kwargs)
        calls.append("after")
        return result

    model.forward = functools.partial(replacement, model)
    runs = engine_of(model).runs
    assert torch.equal(model(X), 2 * X + 3)
    assert calls == ["before", "after"]
    assert engine_of(model).runs == runs + 1
    model.forward = old
    model(X)
    assert calls == ["before", "after"]
    assert engine_of(model).runs == runs + 2


def test_forward_replaced_before_tuning_is_recorded_and_tuned() -> None:
    model: Any = wrapped(Affine().eval())
    old = model.forward
    model.forward = lambda *args, **kwargs: old(*args, **kwargs) * 2
    tune(model, X, device="cpu", registry=empty_registry())
    runs = engine_of(model).runs
    assert torch.equal(model(X), (2 * X + 3) * 2)
    assert engine_of(model).runs == runs + 1


def test_forward_of_the_class_comes_back_when_the_replacement_is_deleted() -> None:
    model: Any = tuned(Affine(), batches(2))
    model.forward = lambda x: x
    assert torch.equal(model(X), X)
    del model.forward
    assert torch.equal(model(X), 2 * X + 3)


def test_forward_keeps_its_signature() -> None:
    model = tuned(Affine(), batches(2))
    assert list(inspect.signature(model.forward).parameters) == ["x"]


class Block(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.attention = Affine(scale, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.attention(x)
        return result


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Block(2.0), Block(5.0)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.decoder(self.encoder(x))
        return result


def test_two_parts_with_one_leaf_name_are_both_tuned() -> None:
    pair = Pair().eval()
    pair.encoder.attention = wrapped(pair.encoder.attention, "attention")  # type: ignore[assignment]
    pair.decoder.attention = wrapped(pair.decoder.attention, "attention")  # type: ignore[assignment]
    report = tune_all(pair, X)
    assert [module.name for module in report.modules] == ["attention", "attention (2)"]
    assert all(module.tuned for module in report.modules)
    encoder, decoder = pair.encoder.attention, pair.decoder.attention
    assert engine_of(encoder) is not engine_of(decoder)
    runs = engine_of(encoder).runs, engine_of(decoder).runs
    assert torch.equal(pair(X), 10 * X)
    assert (engine_of(encoder).runs, engine_of(decoder).runs) == (runs[0] + 1, runs[1] + 1)
    assert "encoder.attention.scale" in pair.state_dict()


def test_wrapped_module_inside_a_wrapped_module() -> None:
    inner = wrapped(Affine(3.0, 0.0).eval(), "inner")
    outer = wrapped(nn.Sequential(inner, nn.ReLU()).eval(), "outer")
    report = tune(outer, X, device="cpu", registry=empty_registry())
    assert sorted(module.name for module in report.modules) == ["inner", "outer"]
    inner_runs, outer_runs = engine_of(inner).runs, engine_of(outer).runs
    assert torch.equal(outer(X), 3 * X)
    assert engine_of(outer).runs == outer_runs + 1
    inner_runs = engine_of(inner).runs
    assert torch.equal(inner(X), 3 * X)
    assert engine_of(inner).runs == inner_runs + 1


def test_tuning_one_module_leaves_another_as_it_was() -> None:
    first = tuned(Affine(), batches(2), name="same")
    engine = engine_of(first)
    second = tuned(Affine(7.0), batches(3), name="same")
    assert engine_of(first) is engine
    assert not engine.closed
    runs = engine.runs
    assert torch.equal(first(X), 2 * X + 3)
    assert engine.runs == runs + 1
    assert torch.equal(second(torch.ones(3, 4)), torch.full((3, 4), 10.0))


def test_only_modules_that_the_calls_reach_are_tuned() -> None:
    used, unused = wrapped(Affine().eval(), "used"), wrapped(Affine().eval(), "unused")
    report = tune_all(lambda x: used(x), X)
    assert [module.name for module in report.modules] == ["used"]
    assert len(graphs_of(used)) == 1
    assert graphs_of(unused) == ()


class Pipeline:
    """Not a module: calls one part in a loop with a number that changes."""

    def __init__(self) -> None:
        self.part = wrapped(Step().eval(), "part")

    def __call__(self, x: Tensor, *, steps: int) -> Tensor:
        for step in range(steps):
            x = self.part(x, step / steps)
        return x


class Step(nn.Module):
    def forward(self, x: Tensor, time: float) -> Tensor:
        return x * 0.5 + time


def test_pipeline_with_a_number_that_changes_has_one_graph() -> None:
    pipeline = Pipeline()
    tune_all(pipeline, [((X,), {"steps": 4})])
    assert len(graphs_of(pipeline.part)) == 1
    runs = engine_of(pipeline.part).runs
    result = pipeline(X, steps=7)
    assert engine_of(pipeline.part).runs == runs + 7
    expected = X
    for step in range(7):
        expected = expected * 0.5 + step / 7
    assert torch.allclose(result, expected)


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_a_tuned_module_is_eager_and_silent(strict: bool) -> None:
    model = tuned(mlp(), batches(2, 3))
    runs = engine_of(model).runs
    program = torch.export.export(model, (X,), strict=strict)
    assert engine_of(model).runs == runs
    assert torch.equal(program.module()(X), state_of(model).module.forward(X))
    assert len(graphs_of(model)) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_trace_of_a_tuned_module_is_eager_and_silent() -> None:
    model = tuned(mlp(), batches(2, 3))
    runs = engine_of(model).runs
    traced = torch.jit.trace(model, (X,), check_trace=False)  # type: ignore[no-untyped-call]
    assert engine_of(model).runs == runs
    assert torch.equal(traced(X), state_of(model).module.forward(X))


def test_compiled_wrapper_gives_the_same_results() -> None:
    model = tuned(mlp(), batches(2, 3))
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert torch.allclose(compiled(X), state_of(model).module.forward(X))
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_function_transforms_give_the_same_results() -> None:
    model = tuned(Affine(), torch.ones(4))
    stacked = torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MissWarning)
        runs = engine_of(model).runs
        result = torch.func.vmap(model, randomness="error")(stacked)
        assert torch.equal(result, 2 * stacked + 3)
        assert engine_of(model).runs == runs, "engines cannot read batched tensors"
        gradient = torch.func.grad(lambda x: model(x).sum())(torch.ones(4))
        assert gradient.tolist() == [2.0] * 4
        tangent = torch.func.jvp(model, (torch.ones(4),), (torch.ones(4),))[1]
        assert tangent.tolist() == [2.0] * 4


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_forward_mode_gradients_are_not_lost() -> None:
    model = tuned(Affine(), torch.ones(4))
    forward_ad: Any = torch.autograd.forward_ad
    runs = engine_of(model).runs
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore", MissWarning)
        result = model(forward_ad.make_dual(torch.ones(4), torch.ones(4)))
        tangent = forward_ad.unpack_dual(result).tangent
    assert engine_of(model).runs == runs, "engines compute no tangents"
    assert tangent is not None
    assert tangent.tolist() == [2.0] * 4


def test_calls_under_inference_mode_work() -> None:
    model = tuned(Affine(), batches(2))
    with torch.inference_mode():
        inside = torch.ones(2, 4)
        assert torch.equal(model(inside), 2 * inside + 3)
    runs = engine_of(model).runs
    assert torch.equal(model(inside), 2 * inside + 3)
    assert engine_of(model).runs == runs + 1


def test_other_threads_are_served_while_a_tuning_records() -> None:
    model = tuned(Affine(), batches(2))
    engine = engine_of(model)
    served: list[int] = []

    def elsewhere() -> None:
        before = engine.runs
        model(X)
        served.append(engine.runs - before)

    def func(x: Tensor) -> Tensor:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        result: Tensor = model(x)
        return result

    tune_all(func, X)
    assert served == [1]


class Slotted(nn.Module):
    __slots__ = ("extra",)

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "extra", 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.extra  # type: ignore[operator]
        return result


def test_module_with_slots_is_wrapped_or_refused_as_a_setting() -> None:
    refused: list[str | None] = []
    try:
        assert torch.equal(tuned(Slotted().eval(), batches(2))(X), X + 4)
    except ConfigError as error:
        refused.append(error.field)
    assert refused in ([], ["module"])


def test_parent_moves_and_modes_reach_the_wrapper() -> None:
    parent = nn.Sequential(tuned(Affine(), batches(2)))
    parent.train()
    assert state_of(parent[0]).module.training  # type: ignore[arg-type]
    parent.eval()
    assert not state_of(parent[0]).module.training  # type: ignore[arg-type]
    parent.double()
    with pytest.warns(MissWarning):
        assert parent(X.double()).dtype is torch.float64


def test_apply_and_module_iteration_work() -> None:
    model = tuned(mlp(), batches(2))
    seen: list[str] = []
    model.apply(lambda module: seen.append(type(module).__name__))
    assert seen.count("Linear") == 2
    assert len(list(model.modules())) == 5
    assert repr(model).count("Linear") == 2
    assert model.get_submodule("0") is state_of(model).module.get_submodule("0")

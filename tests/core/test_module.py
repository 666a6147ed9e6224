from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from fake_plugin import empty_registry
from fakes import AffineBackend, FakeBackend
from samples import Affine, batches, engine_of, graphs_of, mlp, tuned
from torch import Tensor, nn

from aitune_core import (
    BatchDim,
    ConfigError,
    FirstWinsStrategy,
    InputMismatchError,
    MissWarning,
    Module,
    OneBackendStrategy,
    Strategy,
    tune,
)
from aitune_core._module import state_of

X = torch.ones(2, 4)
SHAPES = {"x": {0: BatchDim(1, 8)}}


def test_wrapper_is_of_both_classes_and_shares_everything() -> None:
    net: Any = Affine()
    model: Any = Module(net, "mine")
    assert model.scale is net.scale
    assert list(model.state_dict()) == list(net.state_dict()) == ["scale", "shift"]
    assert [name for name, _ in model.named_parameters()] == ["scale", "shift"]
    model.note = "a"
    assert net.note == "a"
    net.note = "b"
    assert model.note == "b"
    del model.note
    assert not hasattr(net, "note")
    assert list(model.children()) == []
    assert (state_of(model).name, state_of(model).module) == ("mine", net)
    assert type(model).__name__ == "Affine"
    assert isinstance(model, Module)
    assert isinstance(model, Affine)


def test_name_is_by_default_that_of_the_class() -> None:
    assert state_of(Module(Affine())).name == "Affine"


@pytest.mark.parametrize(
    "module", [Affine, None, len, "net", Module(Affine()), torch.ones(1)], ids=str
)
def test_only_unwrapped_module_instances_can_be_wrapped(module: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Module(module)
    assert caught.value.field == "module"
    assert caught.value.value is module


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_modules_are_refused() -> None:
    scripted = torch.jit.trace(Affine(), torch.ones(1))  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError) as caught:
        Module(scripted)
    assert caught.value.field == "module"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": 3}, "name"),
        ({"on_miss": "raise"}, "on_miss"),
        ({"after_tune": "drop"}, "after_tune"),
        ({"strategy": FirstWinsStrategy}, "strategy"),
        ({"strategy": 3}, "strategy"),
        ({"strategy": FakeBackend()}, "strategy"),
        ({"dynamic_shapes": []}, "dynamic_shapes"),
        ({"dynamic_shapes": {"x": {0: "batch"}}}, "dynamic_shapes['x']"),
    ],
)
def test_options_are_checked_when_wrapping(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Module(Affine(), **options)
    assert caught.value.field == field


def test_untuned_wrapper_is_the_module_with_gradients() -> None:
    model: Any = Module(Affine())
    model(torch.ones(1)).sum().backward()
    assert model.scale.grad is not None
    assert model.scale.grad.item() == 1.0


def test_tuned_call_reaches_the_engine_and_has_no_gradients() -> None:
    model: Any = tuned(mlp(), batches(2))
    runs = engine_of(model).runs
    result = model(X)
    assert not result.requires_grad
    assert torch.allclose(result, state_of(model).module.forward(X))
    assert engine_of(model).runs == runs + 1


def test_miss_warns_once_per_reason_naming_the_input() -> None:
    model: Any = tuned(Affine(), batches(2), name="net")
    with pytest.warns(MissWarning) as caught:  # noqa: PT031
        for _ in range(3):
            assert torch.equal(model(torch.ones(5, 4)), torch.full((5, 4), 5.0))
    (warning,) = caught
    assert "'x'" in str(warning.message)
    assert "'net'" in str(warning.message)
    assert warning.filename == __file__
    with pytest.warns(MissWarning) as caught:  # noqa: PT031
        model(torch.ones(4))
        model(torch.ones(5, 4))
        model(torch.ones(4))
    assert len(caught) == 1


def test_sizes_outside_a_range_are_one_reason() -> None:
    model: Any = tuned(Affine(), batches(2), dynamic_shapes=SHAPES)
    with pytest.warns(MissWarning) as caught:  # noqa: PT031
        for size in range(9, 20):
            model(torch.ones(size, 4))
    assert len(caught) == 1


def test_new_tuning_warns_anew() -> None:
    backend = FakeBackend()
    model: Any = tuned(Affine(), batches(2), backend=backend)
    with pytest.warns(MissWarning):
        model(torch.ones(5, 4))
    tune(model, batches(2), device="cpu", registry=empty_registry())
    with pytest.warns(MissWarning):
        model(torch.ones(5, 4))


def test_error_of_eager_after_a_miss_says_why_eager_ran() -> None:
    model: Any = tuned(mlp(), batches(2))
    with pytest.warns(MissWarning), pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 7))
    assert any("'input'" in note for note in caught.value.__notes__)


def test_gradients_flow_through_a_miss() -> None:
    model: Any = tuned(Affine(), batches(2))
    x = X.clone().requires_grad_()
    with pytest.warns(MissWarning):
        model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[2.0] * 4] * 2
    assert model.scale.grad is not None


def test_training_mode_is_eager_and_eval_mode_is_tuned_again() -> None:
    model: Any = tuned(mlp(dropout=0.5), batches(2))
    engine = engine_of(model)
    runs = engine.runs
    model.train()
    assert model(X).requires_grad
    assert engine.runs == runs
    model.eval()
    assert not model(X).requires_grad
    assert engine.runs == runs + 1


STALE: list[Any] = [
    lambda model: model.half(),
    lambda model: model.double(),
    lambda model: model.to(torch.bfloat16),
    lambda model: model.load_state_dict({"scale": torch.tensor(4.0), "shift": torch.tensor(1.0)}),
    lambda model: model.load_state_dict(
        {"scale": torch.tensor(4.0), "shift": torch.tensor(1.0)}, assign=True
    ),
    lambda model: model.load_state_dict({"scale": torch.tensor(4.0)}, strict=False),
    lambda model: setattr(model, "scale", nn.Parameter(torch.tensor(4.0))),
    lambda model: setattr(model.scale, "data", torch.tensor(4.0)),
]


@pytest.mark.parametrize("change", STALE)
def test_changed_weights_drop_the_graphs_with_one_warning(change: Any) -> None:
    model: Any = tuned(Affine(), batches(2), name="net")
    change(model)
    x = X.to(model.scale.dtype)
    with pytest.warns(MissWarning) as caught:
        results = [model(x), model(x)]
    assert len(caught) == 1
    assert "'net'" in str(caught[0].message)
    assert graphs_of(model) == ()
    for result in results:
        assert torch.equal(result, model.scale * x + model.shift)


def test_optimizer_step_drops_the_graphs() -> None:
    model: Any = tuned(Affine(), batches(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.train()
    model(X).sum().backward()
    optimizer.step()
    model.eval()
    with pytest.warns(MissWarning):
        result = model(X)
    assert torch.equal(result, model.scale * X + model.shift)
    assert model.scale.item() == 2.0 - 8.0
    assert graphs_of(model) == ()


@pytest.mark.parametrize("what", ["weight", "bias", "buffer"])
def test_change_of_any_one_tensor_drops_the_graphs(what: str) -> None:
    layers = [nn.Linear(4, 4) for _ in range(8)]
    for each in layers:
        each.register_buffer("buffer", torch.zeros(4))
    models = []
    for layer in layers:
        model = tuned(nn.Sequential(*layers).eval(), batches(2))
        with torch.no_grad():
            getattr(layer, what).add_(1.0)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            model(X)
        models.append(model)
    assert [graphs_of(model) for model in models] == [()] * 8


def test_replaced_part_drops_the_graphs() -> None:
    model: Any = tuned(mlp(), batches(2))
    model[0] = nn.Linear(4, 8)
    with pytest.warns(MissWarning):
        result = model(X)
    assert torch.equal(result, state_of(model).module.forward(X))


def test_parameters_given_for_one_call_are_used() -> None:
    model: Any = tuned(Affine(), batches(2))
    other = {"scale": torch.tensor(10.0), "shift": torch.tensor(0.0)}
    with pytest.warns(MissWarning):
        result = torch.func.functional_call(model, other, (X,))
    assert torch.equal(result, 10 * X)


def test_moving_to_where_it_is_keeps_the_graphs() -> None:
    model: Any = tuned(Affine(), batches(2))
    model.to("cpu").float().eval().requires_grad_(requires_grad=False)
    runs = engine_of(model).runs
    model(X)
    assert engine_of(model).runs == runs + 1


def test_copy_is_independent_and_not_tuned() -> None:
    model: Any = tuned(Affine(), batches(2), name="net", dynamic_shapes=SHAPES, on_miss="error")
    duplicate = copy.deepcopy(model)
    assert isinstance(duplicate, Module)
    assert isinstance(duplicate, Affine)
    assert graphs_of(duplicate) == ()
    assert len(graphs_of(model)) == 1
    assert duplicate.scale is not model.scale
    state = state_of(duplicate)
    assert (state.name, state.on_miss) == ("net", "error")
    assert state.dynamic_shapes == SHAPES
    with torch.no_grad():
        duplicate.scale.fill_(100.0)
    runs = engine_of(model).runs
    assert torch.equal(model(X), 2 * X + 3)
    assert engine_of(model).runs == runs + 1
    assert torch.equal(duplicate(X), 100 * X + 3)


def test_copy_of_a_parent_copies_the_wrapper() -> None:
    parent: Any = nn.Sequential(OrderedDict(inner=tuned(Affine(), batches(2))))
    duplicate = copy.deepcopy(parent)
    assert isinstance(duplicate.inner, Module)
    assert duplicate.inner.scale is not parent.inner.scale
    assert torch.equal(duplicate(X), 2 * X + 3)


def test_untuned_wrapper_pickles_with_its_options() -> None:
    strategy = OneBackendStrategy(("fake", {"label": "a"}))
    model: Any = Module(
        Affine(4.0), "net", strategy=strategy, dynamic_shapes=SHAPES, on_miss="error"
    )
    restored = pickle.loads(pickle.dumps(model))
    assert isinstance(restored, Module)
    assert isinstance(restored, Affine)
    assert restored.scale.item() == 4.0
    state = state_of(restored)
    assert (state.name, state.on_miss, state.dynamic_shapes) == ("net", "error", SHAPES)
    assert isinstance(state.strategy, Strategy)
    assert state.strategy.backends == strategy.backends


def test_tuned_wrapper_refuses_to_pickle_and_points_at_save() -> None:
    with pytest.raises(TypeError, match=r"aitune_core\.save"):
        pickle.dumps(tuned(Affine(), batches(2)))


def test_offloaded_weights_come_back_for_eager() -> None:
    model: Any = tuned(Affine(), batches(2), after_tune="offload")
    runs = engine_of(model).runs
    assert torch.equal(model(X), 2 * X + 3)
    assert engine_of(model).runs == runs + 1
    with pytest.warns(MissWarning):
        assert torch.equal(model(torch.ones(7, 4)), torch.full((7, 4), 5.0))
    model(X)
    assert engine_of(model).runs == runs + 2


def test_weights_changed_after_offloading_drop_the_graphs() -> None:
    model: Any = tuned(Affine(), batches(2), after_tune="offload")
    model.load_state_dict({"scale": torch.tensor(10.0), "shift": torch.tensor(0.0)})
    with pytest.warns(MissWarning):
        assert torch.equal(model(X), 10 * X)


def test_released_weights_leave_the_engine_and_make_a_miss_an_error() -> None:
    model: Any = tuned(
        Affine(), batches(2), backend=AffineBackend(), after_tune="release", name="net"
    )
    assert model.scale.device.type == "meta"
    assert torch.equal(model(X), 2 * X + 3)
    with pytest.raises(InputMismatchError) as caught:
        model(torch.ones(7, 4))
    assert (caught.value.path, caught.value.expected, caught.value.got) == ("x", 2, 7)
    model.train()
    with pytest.raises(InputMismatchError):
        model(X)


NEW = {"scale": torch.tensor(10.0), "shift": torch.tensor(0.0)}


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.load_state_dict(NEW, assign=True),
        lambda model: model.load_state_dict({"scale": NEW["scale"]}, assign=True, strict=False),
        lambda model: model.load_state_dict(NEW),
        lambda model: setattr(model, "shift", nn.Parameter(torch.tensor(0.0))),
        lambda model: setattr(model, "inner", nn.Linear(4, 4)),
    ],
)
def test_weights_changed_after_release_make_every_call_an_error(change: Any) -> None:
    model: Any = tuned(
        Affine(), batches(2), backend=AffineBackend(), after_tune="release", name="net"
    )
    change(model)
    for _ in range(3):
        with pytest.raises(InputMismatchError, match=r"'net' were changed.*load its file again"):
            model(X)
    assert len(graphs_of(model)) == 1


def test_weights_given_for_one_call_after_release_fail_that_call_only() -> None:
    model: Any = tuned(Affine(), batches(2), backend=AffineBackend(), after_tune="release")
    with pytest.raises(InputMismatchError):
        torch.func.functional_call(model, NEW, (X,))
    assert torch.equal(model(X), 2 * X + 3)


@pytest.mark.parametrize(
    ("move", "field", "value"),
    [
        (lambda model: model.half(), "dtype", torch.float16),
        (lambda model: model.to(torch.float64), "dtype", torch.float64),
        (lambda model: model.to("meta"), "device", torch.device("meta")),
        (lambda model: nn.Sequential(model).bfloat16(), "dtype", torch.bfloat16),
    ],
)
def test_module_without_weights_cannot_be_moved_or_converted(
    move: Any, field: str, value: Any
) -> None:
    model: Any = tuned(
        Affine(), batches(2), backend=AffineBackend(), after_tune="release", name="net"
    )
    with pytest.raises(ConfigError, match="'net' has no weights here and runs on cpu") as caught:
        move(model)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert torch.equal(model(X), 2 * X + 3)


def test_module_without_weights_may_stay_what_it_is() -> None:
    model: Any = tuned(Affine(), batches(2), backend=AffineBackend(), after_tune="release")
    assert model.to("cpu").float().to(torch.float32) is model
    assert torch.equal(nn.Sequential(model).cpu()(X), 2 * X + 3)


@pytest.mark.parametrize("after_tune", ["keep", "offload"])
def test_weights_stay_where_eager_needs_them(after_tune: Any) -> None:
    model: Any = tuned(Affine(), batches(2), after_tune=after_tune)
    assert model.scale.device.type == "cpu"


class Calls(nn.Module):
    """Calls itself from other methods, as ``generate`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale

    def twice(self, x: Tensor) -> Tensor:
        first: Tensor = self(x)
        second: Tensor = self.forward(first)
        return second


def test_methods_of_the_wrapped_class_use_tuned_graphs() -> None:
    model: Any = tuned(Calls().eval(), batches(2))
    runs = engine_of(model).runs
    assert torch.equal(model.twice(X), 4 * X)
    assert engine_of(model).runs == runs + 2


def test_engines_do_not_keep_an_unused_wrapper_alive() -> None:
    model: Any = tuned(Affine(), batches(2), backend=FakeBackend())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None

"""What libraries do to the wrapper of a module, as they do it to modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from samples import Affine, batches, engine_of, graphs_of, mlp, tuned
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from aitune_core import ConfigError, MissWarning, Module
from aitune_core._module import state_of

X = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("container", "key"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), slice(1)),
        (nn.ModuleList([nn.Linear(4, 4), nn.ReLU()]), slice(1)),
        (nn.ParameterList([torch.ones(1), torch.ones(1)]), slice(1)),
    ],
    ids=["Sequential", "ModuleList", "ParameterList"],
)
def test_slice_of_a_container_is_one_of_its_class(container: Any, key: Any) -> None:
    model: Any = Module(container)
    part = model[key]
    assert type(part) is type(container)
    assert len(part) == 1
    assert part[0] is container[0]


class Wrapping(nn.Module):
    """Makes another one of its class around a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def again(self) -> Any:
        return self.__class__(self.inner)

    def again_by_type(self) -> Any:
        return type(self)(self.inner)


def test_method_that_makes_another_module_gives_the_wrapped_class() -> None:
    inner = nn.ReLU()
    model: Any = Module(Wrapping(inner))
    for made in (model.again(), model.again_by_type()):
        assert type(made) is Wrapping
        assert made.inner is inner


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_parametrization_reaches_the_wrapped_module() -> None:
    net = nn.Linear(4, 3).eval()
    weight, bias = net.weight.detach().clone(), net.bias.detach()
    model: Any = tuned(net, batches(2))
    parametrize.register_parametrization(model, "weight", Twice())
    assert isinstance(model, Module)
    assert isinstance(net, model.__class__)
    assert torch.equal(net.weight, 2 * weight)
    with pytest.warns(MissWarning):
        result = model(X)
    assert torch.equal(result, nn.functional.linear(X, 2 * weight, bias))
    assert graphs_of(model) == ()
    duplicate = copy.deepcopy(model)
    assert isinstance(duplicate, Module)
    assert torch.equal(duplicate(X), result)
    parametrize.remove_parametrizations(model, "weight", leave_parametrized=False)
    assert type(net) is nn.Linear
    assert model.__class__ is nn.Linear
    assert torch.equal(model(X), nn.functional.linear(X, weight, bias))


class Shifted(Affine):
    def forward(self, x: Tensor, *, by: float = 10.0) -> Tensor:
        return super().forward(x) + by


def test_other_class_with_the_same_weights_drops_the_graphs() -> None:
    model: Any = tuned(Affine(), batches(2))
    model.__class__ = Shifted
    with pytest.warns(MissWarning):
        assert torch.equal(model(X), 2 * X + 13)
    assert str(state_of(model).call_form) == "(x, by=...)"


@pytest.mark.parametrize("value", [type(Module(Affine())), int, 3])
def test_class_that_a_wrapper_cannot_have_is_refused(value: Any) -> None:
    net = Affine()
    model: Any = tuned(net, batches(2))
    with pytest.raises(ConfigError) as caught:
        model.__class__ = value
    assert (caught.value.field, caught.value.value) == ("__class__", value)
    assert type(net) is Affine
    assert model.__class__ is Affine
    assert len(graphs_of(model)) == 1


def test_class_of_another_layout_changes_nothing() -> None:
    class Slotted(nn.Module):
        __slots__ = ("more",)

    model: Any = Module(Affine())
    with pytest.raises(ConfigError):
        model.__class__ = Slotted
    assert model.__class__ is Affine


def test_shallow_copy_shares_the_weights() -> None:
    model: Any = Module(Affine(), "net", on_miss="error")
    duplicate: Any = copy.copy(model)
    duplicate.note = "mine"
    assert not hasattr(model, "note")
    assert isinstance(duplicate, Module)
    assert duplicate.scale is model.scale
    assert state_of(duplicate).module is not state_of(model).module
    assert (state_of(duplicate).name, state_of(duplicate).on_miss) == ("net", "error")


def test_shallow_copy_of_a_tuned_wrapper_points_at_deepcopy() -> None:
    with pytest.raises(TypeError, match=r"copy\.deepcopy"):
        copy.copy(tuned(Affine(), batches(2)))


def test_repr_says_how_many_graphs_are_tuned() -> None:
    model = Module(nn.ReLU())
    assert repr(model) == "ReLU()"
    assert repr(tuned(nn.ReLU().eval(), batches(2))) == "ReLU() [1 tuned graph on cpu]"
    two = tuned(nn.ReLU().eval(), [torch.ones(2), torch.ones(2, 2)])
    assert repr(two) == "ReLU() [2 tuned graphs on cpu]"


class Gate(nn.Module):
    """Not a container, whose code tracers know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        return torch.sigmoid(self.linear(x)) * factor


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "trace",
    [
        fx.symbolic_trace,
        torch.jit.script,
        lambda module: torch.jit.trace(module, X),  # type: ignore[no-untyped-call]
    ],
    ids=["fx", "script", "trace"],
)
@pytest.mark.parametrize("outer", [lambda model: model, nn.Sequential], ids=["itself", "a part"])
@pytest.mark.parametrize("is_tuned", [True, False], ids=["tuned", "untuned"])
def test_tracers_follow_the_wrapped_code(trace: Any, outer: Any, *, is_tuned: bool) -> None:
    net = Gate().eval()
    model = tuned(net, batches(2), on_miss="error") if is_tuned else Module(net)
    with torch.no_grad():
        traced = trace(outer(model))
        x = torch.randn(5, 4)
        assert torch.equal(traced(x), net(x))
        # The module itself is as it was.
        if is_tuned:
            runs = engine_of(model).runs
            model(X)
            assert engine_of(model).runs == runs + 1


def test_forward_of_the_class_is_that_of_the_wrapped_class() -> None:
    model: Any = Module(mlp())
    assert type(model).forward is nn.Sequential.forward
    assert Module.forward is nn.Module.forward

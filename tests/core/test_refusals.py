from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_plugin import empty_registry
from fakes import FakeBackend
from samples import Affine, Function, engine_of, graphs_of, tuned
from torch import Tensor, nn

from aitune_core import ConfigError, DynamicDim, Module, OneBackendStrategy, RecordingError, tune
from aitune_core import _room as room

X = torch.ones(2, 4)


def wrapped(net: nn.Module) -> Module:
    return Module(net, "net", strategy=OneBackendStrategy(FakeBackend()))


def tune_on_cpu(func: Any, data: Any = X, **options: Any) -> Any:
    return tune(func, data, device="cpu", registry=empty_registry(), **options)


@pytest.mark.parametrize("pipeline", [False, True])
def test_lazy_module_is_refused_until_it_ran(*, pipeline: bool) -> None:
    net: Any = nn.Sequential(nn.LazyLinear(3)).eval()
    model = wrapped(net)
    func = (lambda x: model(x)) if pipeline else model
    with pytest.raises(RecordingError, match="run the module on one call first") as caught:
        tune_on_cpu(func)
    assert (caught.value.module_name, caught.value.path) == ("net", "0.weight")
    assert net[0].has_uninitialized_params()
    model(X)
    tune_on_cpu(func)
    assert len(graphs_of(model)) == 1
    assert model(X).shape == (2, 3)


def test_lazy_module_itself_becomes_what_it_stands_for_when_wrapped() -> None:
    net = nn.LazyLinear(3).eval()
    model: Any = wrapped(net)
    model(X)
    assert type(net) is nn.Linear
    assert model.__class__ is nn.Linear
    tune_on_cpu(model)
    runs = engine_of(model).runs
    model(X)
    assert engine_of(model).runs == runs + 1


class Array:
    """What NumPy's arrays are recognised by."""

    __array_interface__: dict[str, Any] = {}  # noqa: RUF012 - as NumPy has it


Array.__name__ = Array.__qualname__ = "ndarray"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize(
    ("value", "step"),
    [
        (lambda: Array(), "torch.from_numpy"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "to_padded_tensor"),
        (lambda: torch.ones(2, 4, device="meta"), "holds no values"),
        (lambda: torch.eye(4).to_sparse(), "to_dense"),
        (lambda: torch.eye(4).to_sparse_csr(), "to_dense"),
        (lambda: torch.quantize_per_tensor(X, 1.0, 0, torch.quint8), "dequantize"),
    ],
    ids=["array", "nested", "meta", "sparse", "csr", "quantized"],
)
@pytest.mark.parametrize(
    ("form", "path"),
    [
        (lambda value: [value], "x"),
        (lambda value: {"x": value}, "x"),
        (lambda value: (X, {"a": [value]}), "more['a'][0]"),
    ],
    ids=["alone", "by keyword", "nested in a container"],
)
def test_what_is_no_dense_tensor_is_refused_before_the_module_runs(
    value: Any, step: str, form: Any, path: str
) -> None:
    calls: list[Tensor] = []

    def forward(x: Any, more: Any = None) -> Any:
        calls.append(x)
        return x

    model = wrapped(Function(forward))
    with pytest.raises(ConfigError, match=step) as caught:
        tune_on_cpu(model, form(value()))
    assert (caught.value.field, caught.value.value) == ("input_data", path)
    assert f"{path!r}" in str(caught.value)
    assert calls == []
    assert model.training


def test_scalars_of_other_libraries_are_to_be_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    model = wrapped(Function(lambda x, k: x * k))
    with pytest.raises(ConfigError, match=r"numpy\.float32.*item\(\)") as caught:
        tune_on_cpu(model, [(X, numpy.float32(3))])
    assert caught.value.value == "k"


@pytest.mark.parametrize("result", [None, {"rows": 3}, []])
def test_result_without_tensors_is_refused(result: Any) -> None:
    model = wrapped(Function(lambda x: result))
    with pytest.raises(RecordingError, match="'net', graph_0: the result holds no tensor"):
        tune_on_cpu(model)
    report = tune_on_cpu(model, on_failure="eager")
    assert "no tensor" in report.modules[0].graphs[0].reason
    assert model(X) == result


def test_module_that_only_changes_its_input_has_something_to_give() -> None:
    def fill(x: Tensor) -> None:
        x.fill_(7.0)

    model: Any = tuned(Function(fill).eval(), X.clone())
    x = torch.zeros(2, 4)
    runs = engine_of(model).runs
    assert model(x) is None
    assert torch.equal(x, torch.full((2, 4), 7.0))
    assert engine_of(model).runs == runs + 1


def test_range_that_no_memory_holds_is_refused_with_its_bytes() -> None:
    dim = DynamicDim("rows", 1, 2**40)
    model: Any = Module(Affine().eval(), "net", dynamic_shapes={"x": {0: dim}})
    with pytest.raises(ConfigError, match=r"\(rows\[1\.\.\d+\]\) need 17\.6 TB.*'x'") as caught:
        tune_on_cpu(model, strategy=OneBackendStrategy(FakeBackend()))
    assert (caught.value.field, caught.value.value) == ("dynamic_shapes", 2**40 * 4 * 4)
    assert graphs_of(model) == ()


@pytest.mark.parametrize(("bytes_of_memory", "fits"), [(8 * 4 * 4 + 4, True), (8 * 4 * 4, False)])
def test_inputs_of_one_device_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, bytes_of_memory: int, *, fits: bool
) -> None:
    monkeypatch.setattr(room, "_memory", lambda _device: bytes_of_memory)
    shapes: dict[str, Any] = {"x": [None, DynamicDim("n", 1, 8)], "y": {-1: 3}}
    calls = [{"x": torch.ones(4, 2), "y": torch.ones(1)}]
    if fits:
        room.check_room("net", shapes, calls)
    else:
        with pytest.raises(ConfigError) as caught:
            room.check_room("net", shapes, calls)
        assert caught.value.value == 8 * 4 * 4 + 4
    room.check_room("net", {}, calls)


def test_running_out_of_memory_names_the_dims() -> None:
    shapes = {"x": {0: DynamicDim("rows", 1, 10)}}
    with (
        pytest.raises(ConfigError, match=r"rows\[1\.\.10\]") as caught,
        room.naming_dims("net", shapes),
    ):
        torch.empty(2**60)
    assert caught.value.field == "dynamic_shapes"
    assert isinstance(caught.value.__cause__, RuntimeError)
    # Without declared dims, the allocator's error is the whole story.
    with pytest.raises(RuntimeError), room.naming_dims("net", {}):
        torch.empty(2**60)
    with pytest.raises(RuntimeError, match="shape"), room.naming_dims("net", shapes):
        torch.ones(2).view(3)

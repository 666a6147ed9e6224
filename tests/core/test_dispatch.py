from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeBackend, Fault
from samples import Function, batches, engine_of, graphs_of, mlp, tuned
from torch import Tensor

from aitune_core import (
    BatchDim,
    CallFormError,
    DynamicDim,
    InputMismatchError,
    MissWarning,
    _dispatch,
)
from aitune_core._dispatch import Dispatcher, Miss
from aitune_core._module import state_of

X = torch.ones(2, 4)


def two_inputs(x: Tensor, y: Tensor | None = None, *, scale: Any = 1.0, mode: str = "a") -> Tensor:
    result = x * scale if mode == "a" else x
    return result if y is None else result + y


def model_of(function: Any, *calls: Any, **options: Any) -> Any:
    return tuned(Function(function).eval(), list(calls), **options)


DIMS = {"x": {0: BatchDim(1, 8)}, "y": {0: BatchDim(1, 8), 1: DynamicDim("width", 1, 9)}}


@pytest.fixture
def model() -> Any:
    def forward(x: Tensor, y: Tensor, mode: str = "a") -> Tensor:
        return x + y.sum() if mode == "a" else x

    return model_of(forward, (X, X), dynamic_shapes=DIMS, on_miss="error", name="net")


@pytest.mark.parametrize(
    ("args", "kwargs", "path", "expected", "got"),
    [
        ((X.double(), X), {}, "x", "float32", "float64"),
        ((X[0], X), {}, "x", 2, 1),
        ((torch.ones(2, 5), X), {}, "x", 4, 5),
        ((torch.ones(9, 4), torch.ones(9, 4)), {}, "x", "batch[1..8]", 9),
        ((torch.ones(0, 4), torch.ones(0, 4)), {}, "x", "batch[1..8]", 0),
        ((X, torch.ones(2, 10)), {}, "y", "width[1..9]", 10),
        ((X, torch.ones(3, 4)), {}, "y", 2, 3),
        ((X, 1.0), {}, "y", "a tensor", "1.0"),
        ((X, None), {}, "y", "a tensor", "None"),
        ((X, X), {"mode": "b"}, "mode", "'a'", "'b'"),
        ((X, [X]), {}, "y", "a tensor", "a list of 1 with 1 tensor"),
    ],
)
def test_miss_says_what_stands_in_the_way(  # noqa: PLR0917
    model: Any, args: Any, kwargs: Any, path: str, expected: object, got: object
) -> None:
    runs = engine_of(model).runs
    with pytest.raises(InputMismatchError) as caught:
        model(*args, **kwargs)
    assert (caught.value.path, caught.value.expected, caught.value.got) == (path, expected, got)
    assert not isinstance(caught.value, CallFormError)
    assert engine_of(model).runs == runs


@pytest.mark.parametrize(
    ("args", "kwargs", "path"),
    [((), {}, "x"), ((X,), {}, "y"), ((X, X), {"z": 1}, "z"), ((X, X), {"x": X}, "x")],
)
def test_calls_that_do_not_fit_the_signature_are_type_errors(
    model: Any, args: Any, kwargs: Any, path: str
) -> None:
    with pytest.raises(TypeError) as caught:
        model(*args, **kwargs)
    assert isinstance(caught.value, CallFormError)
    assert caught.value.path == path


def test_calls_that_do_not_fit_the_signature_are_type_errors_with_eager_at_hand() -> None:
    model = model_of(two_inputs, (X,))
    with pytest.raises(TypeError):
        model(X, surplus=1)


@pytest.mark.parametrize("value", [np.ones(2), object(), {1, 2}])
def test_arguments_that_no_graph_holds_are_misses_with_their_path(model: Any, value: Any) -> None:
    with pytest.raises(InputMismatchError) as caught:
        model(X, {"k": [value]})
    assert caught.value.path == "y['k'][0]"


def test_input_that_requires_grad_is_a_miss_only_while_grad_is_enabled(model: Any) -> None:
    x = X.clone().requires_grad_()
    with pytest.raises(InputMismatchError) as caught:
        model(X, x)
    assert caught.value.path == "y"
    assert caught.value.expected == "no grad"
    runs = engine_of(model).runs
    with torch.no_grad():
        assert not model(X, x).requires_grad
    with torch.inference_mode():
        assert not model(X, x).requires_grad
    assert not model(X, X).requires_grad
    assert engine_of(model).runs == runs + 3


class Tagged(Tensor):
    pass


@pytest.mark.parametrize(
    "tensor", [X.to_sparse(), X.as_subclass(Tagged), torch.ones(2, 4, device="meta")]
)
def test_tensors_that_no_engine_reads_are_misses(model: Any, tensor: Tensor) -> None:
    with pytest.raises(InputMismatchError) as caught:
        model(X, tensor)
    assert caught.value.path == "y"


def test_calls_under_autocast_are_misses(model: Any) -> None:
    model(X, X)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(InputMismatchError) as caught,
    ):
        model(X, X)
    assert caught.value.path == "autocast"


def test_miss_speaks_of_the_nearest_of_several_graphs() -> None:
    model = model_of(two_inputs, (X, X), (X.double(), X.double()), on_miss="error")
    with pytest.raises(InputMismatchError) as caught:
        model(X, X.double())
    assert caught.value.path in ("x", "y")
    with pytest.raises(InputMismatchError) as caught:
        model(torch.ones(2, 5).double(), X.double())
    assert (caught.value.path, caught.value.expected, caught.value.got) == ("x", 4, 5)


def test_miss_of_a_number_says_how_it_becomes_an_input_or_what_graphs_take() -> None:
    def scaled(x: Tensor, by: int) -> Tensor:
        return x * by

    model = model_of(scaled, (X, 3), on_miss="error")
    with pytest.raises(InputMismatchError, match="takes 3; record calls with several values"):
        model(X, 4)

    def shaped(x: Tensor, rows: int) -> list[Tensor]:
        return [x] * rows

    model = model_of(shaped, (X, 2), (X, 3), on_miss="error")
    with pytest.raises(InputMismatchError, match="takes 2 or 3; record such a call") as caught:
        model(X, 4)
    assert caught.value.expected == "2 or 3"


def test_each_calling_form_has_its_graph() -> None:
    model = model_of(two_inputs, (X,), (X, X), ((X.long(),), {"mode": "b"}))
    assert len(graphs_of(model)) == 3
    before = [engine_of(model, position).runs for position in range(3)]
    assert torch.equal(model(y=X, x=X), X + X)
    assert torch.equal(model(x=X.long(), mode="b"), X.long())
    assert torch.equal(model(X, None, scale=1.0), X)
    after = [engine_of(model, position).runs for position in range(3)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 1]


def test_int32_input_is_never_sent_to_a_float32_graph() -> None:
    model = model_of(two_inputs, (X,))
    runs = engine_of(model).runs
    with pytest.warns(MissWarning):
        assert model(X.int()).dtype is torch.float32
    assert engine_of(model).runs == runs


def test_numbers_that_changed_are_inputs_of_the_graph() -> None:
    model = model_of(two_inputs, ((X,), {"scale": 2.0}), ((X,), {"scale": 3.0}))
    runs = engine_of(model).runs
    assert torch.equal(model(X, scale=7.5), X * 7.5)
    assert torch.equal(model(X, None, scale=-0.0), X * -0.0)
    assert torch.equal(model(X), X)
    assert engine_of(model).runs == runs + 3


@pytest.mark.parametrize(
    ("scale", "got"), [(2, "2"), (True, "True"), (None, "None"), ("s", "'s'"), ([1.0], "a list")]
)
def test_other_value_where_a_number_is_an_input_is_a_miss(scale: Any, got: str) -> None:
    model = model_of(two_inputs, ((X,), {"scale": 2.0}), ((X,), {"scale": 3.0}), on_miss="error")
    with pytest.raises(InputMismatchError) as caught:
        model(X, scale=scale)
    assert caught.value.path == "scale"
    assert str(caught.value.got).startswith(got)


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**80])
def test_number_that_no_tensor_holds_is_a_miss(number: int) -> None:
    model = model_of(lambda x, n: x * 1 if n > 5 else x * 2, (X, 1), (X, 2))
    with pytest.warns(MissWarning):
        assert torch.equal(model(X, number), X if number > 5 else X * 2)


def test_zero_rank_and_strided_and_empty_inputs_work() -> None:
    model = model_of(
        lambda x, t: x * t, (X, torch.tensor(2.0)), dynamic_shapes={"x": {0: BatchDim(0, 4)}}
    )
    runs = engine_of(model).runs
    strided = torch.arange(16.0).reshape(4, 4).t()[:2]
    for x in (X, strided, torch.ones(0, 4), torch.ones(1, 1).expand(3, 4)):
        assert torch.equal(model(x, torch.tensor(3.0)), x * 3.0)
    assert engine_of(model).runs == runs + 4


def test_module_without_tensor_inputs_has_a_graph() -> None:
    model = model_of(lambda n=3: torch.full((2,), float(n)), ())
    runs = engine_of(model).runs
    assert model().tolist() == [3.0, 3.0]
    assert model(3).tolist() == [3.0, 3.0]
    assert engine_of(model).runs == runs + 2


def test_changed_inputs_are_written_back() -> None:
    def forward(x: Tensor, cache: dict[str, Tensor]) -> None:
        cache["k"].add_(x)

    model = model_of(forward, (X, {"k": torch.zeros(2, 4)}))
    runs = engine_of(model).runs
    cache = torch.zeros(4, 2).t()
    assert model(X, {"k": cache}) is None
    assert cache.tolist() == X.tolist()
    parameter = torch.nn.Parameter(torch.zeros(2, 4))
    with torch.no_grad():
        model(X, {"k": parameter})
    assert parameter.tolist() == X.tolist()
    assert engine_of(model).runs == runs + 2


def test_results_keep_their_structure() -> None:
    model = model_of(lambda x: {"a": (x + 1, None), "b": [x, 3, "s"]}, (X,))
    result = model(X)
    assert list(result) == ["a", "b"]
    assert result["a"][1] is None
    assert torch.equal(result["a"][0], X + 1)
    assert result["b"][1:] == [3, "s"]
    first, second = model(X), model(X)
    first["b"].append(4)
    assert len(second["b"]) == 3


def test_results_are_the_callers() -> None:
    model = model_of(lambda x: x * 2, (X,))
    first = model(X)
    model(X * 5)
    assert torch.equal(first, X * 2)


def test_misses_are_reported_by_find() -> None:
    model = model_of(lambda x: x * 2, (X,))
    dispatcher = state_of(model).dispatcher
    assert isinstance(dispatcher, Dispatcher)
    graph, leaves = dispatcher.find((X,), {})
    assert graph is graphs_of(model)[0]
    assert leaves[0] is X
    with pytest.raises(Miss) as caught:
        dispatcher.find((X[0],), {})
    assert caught.value.reason is not None
    assert caught.value.reason.path == "x"


def test_memory_of_accepted_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch, "_MAX_REMEMBERED", 3)
    model = model_of(lambda x: x * 2, (X,), dynamic_shapes={"x": {0: BatchDim(1, 50)}})
    for size in range(1, 20):
        assert model(torch.ones(size, 4)).shape == (size, 4)
    dispatcher = state_of(model).dispatcher
    assert dispatcher is not None
    assert len(dispatcher._remembered) <= 3


def test_many_threads_all_reach_the_engine() -> None:
    model = tuned(mlp(), batches(1, 8), name="net")
    engine = engine_of(model)
    engine.runs = 0
    inputs = batches(*range(1, 9))
    with torch.no_grad():
        expected = [state_of(model).module.forward(x) for x in inputs]
    wrong: list[object] = []
    barrier = threading.Barrier(16)

    def work(number: int) -> None:
        barrier.wait()
        for call in range(200):
            place = (number + call) % 8
            try:
                if not torch.allclose(model(inputs[place]), expected[place], atol=1e-6):
                    wrong.append((number, call))
            except Exception as error:  # noqa: BLE001
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert engine.runs == 16 * 200


def test_engine_errors_are_not_hidden() -> None:
    model = model_of(lambda x: x * 2, (X,))
    engine_of(model).fault = Fault.RAISES
    with pytest.raises(RuntimeError, match="the engine broke"):
        model(X)


def test_backend_of_each_graph_is_known() -> None:
    backend = FakeBackend(label="mine")
    model = model_of(lambda x: x * 2, (X,), backend=backend)
    assert graphs_of(model)[0].backend is backend


def test_array_of_numpy_is_a_miss_that_says_how_to_give_a_tensor() -> None:
    model = tuned(mlp(), batches(2), on_miss="error")
    with pytest.raises(InputMismatchError, match=r"numpy\.ndarray; give a tensor: torch\.from_num"):
        model(np.ones((2, 4), np.float32))

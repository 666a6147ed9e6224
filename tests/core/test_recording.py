from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from samples import Function, recorded, recording_of
from torch import Tensor, nn

from aitune_core import RecordingError
from aitune_core._tensors import plain_tensor, same_bits

X, Y = torch.ones(2, 3), torch.zeros(2, 3)


def problem_of(module: Any, *calls: Any) -> RecordingError:
    with pytest.raises(RecordingError) as caught:
        recorded(module, *calls)
    assert caught.value.module_name == "net"
    return caught.value


def test_positional_and_keyword_calls_are_one_graph() -> None:
    def forward(x: Tensor, y: Tensor, scale: float = 2.0, *, mask: Tensor | None = None) -> Tensor:
        return x * scale + y

    graphs = recorded(
        forward,
        (X, Y),
        ((X,), {"y": Y}),
        ((), {"y": Y, "x": X}),
        (X, Y, 2.0),
        ((X, Y), {"mask": None, "scale": 2.0}),
    )
    assert [len(graph.samples) for graph in graphs] == [5]
    assert [spec.path for spec in graphs[0].spec.inputs] == ["x", "y"]
    for sample in graphs[0].samples:
        assert torch.equal(sample[0], X)
        assert torch.equal(sample[1], Y)


def test_none_and_tensor_are_two_graphs() -> None:
    def forward(x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x if mask is None else x * mask

    graphs = recorded(forward, (X,), (X, Y), (X, None))
    assert [len(graph.samples) for graph in graphs] == [2, 1]
    assert [[spec.path for spec in graph.spec.inputs] for graph in graphs] == [
        ["x"],
        ["x", "mask"],
    ]
    assert [graph.spec.name for graph in graphs] == ["graph_0", "graph_1"]


def test_variable_arguments_have_paths_of_their_own() -> None:
    graphs = recorded(lambda *xs, **named: xs[0] + named["k"], ((X, Y), {"k": X}))
    assert [spec.path for spec in graphs[0].spec.inputs] == ["xs[0]", "xs[1]", "named['k']"]


def test_order_of_a_dict_is_part_of_the_form() -> None:
    graphs = recorded(
        lambda inputs: list(inputs.values()), ({"a": X, "b": Y},), ({"b": Y, "a": X},)
    )
    assert [[spec.path for spec in graph.spec.inputs] for graph in graphs] == [
        ["inputs['a']", "inputs['b']"],
        ["inputs['b']", "inputs['a']"],
    ]


def test_one_tensor_twice_is_two_inputs() -> None:
    graphs = recorded(lambda x, y: x + y, (X, X), (X, Y))
    assert [len(graph.samples) for graph in graphs] == [2]
    assert len(graphs[0].spec.inputs) == 2


@pytest.mark.parametrize(
    "other", [torch.ones(2, 3, dtype=torch.float64), torch.ones(2, 3, 1), torch.tensor(1.0)]
)
def test_dtype_and_rank_are_part_of_the_form(other: Tensor) -> None:
    assert len(recorded(lambda x: x * 2, (X,), (other,))) == 2


def test_flags_and_texts_are_part_of_the_form() -> None:
    def forward(x: Tensor, mode: Any) -> Tensor:
        return x * 2 if mode else x

    graphs = recorded(forward, (X, True), (X, "a"), (X, None), (X, torch.float16), (X, True))
    assert [len(graph.samples) for graph in graphs] == [2, 1, 1, 1]


def test_numbers_that_change_become_inputs() -> None:
    graphs = recorded(lambda x, scale: x * scale, (X, 1.5), (X, 2.5), (X, 1.5))
    (graph,) = graphs
    assert [(spec.path, spec.dtype, spec.shape) for spec in graph.spec.inputs] == [
        ("x", torch.float32, (2, 3)),
        ("scale", torch.float64, ()),
    ]
    assert [sample[1].item() for sample in graph.samples] == [1.5, 2.5, 1.5]
    assert [len(by_value.samples) for by_value in graph.by_value] == [2, 1]
    assert [len(by_value.spec.inputs) for by_value in graph.by_value] == [1, 1]


def test_numbers_that_stay_are_constants() -> None:
    (graph,) = recorded(lambda x, a, b: x * a + b, (X, 2, 3.0), (X, 2, 4.0))
    assert [spec.path for spec in graph.spec.inputs] == ["x", "b"]
    args, kwargs = graph.arguments(graph.samples[1])
    assert args == ()
    assert torch.equal(kwargs.pop("x"), X)
    assert kwargs == {"a": 2, "b": 4.0}
    assert [type(value) for value in kwargs.values()] == [int, float]


def test_reference_gets_numbers_and_backends_get_tensors() -> None:
    seen: list[type] = []

    def forward(x: Tensor, scale: Any) -> Tensor:
        seen.append(type(scale))
        result: Tensor = x * scale
        return result

    (graph,) = recorded(forward, (X, 2), (X, 3))
    seen.clear()
    assert torch.equal(graph.reference(*graph.samples[1])[0], X * 3)
    assert torch.equal(graph.flat_module(*graph.samples[1])[0], X * 3)
    assert seen == [int, Tensor]


def test_number_that_decides_the_result_structure_is_no_input() -> None:
    """Non-tensor values are part of the form, so these are two graphs as two flags would be."""
    graphs = recorded(lambda x, count: [x * 1] * count, (X, 1), (X, 2))
    exact = [each for graph in graphs for each in (graph.by_value or (graph,))]
    assert [len(each.spec.outputs) for each in exact] == [1, 2]


def test_huge_numbers_are_recorded() -> None:
    graphs = recorded(lambda x, seed: x * 1, (X, 2**64), (X, 2**65))
    values = [graph for each in graphs for graph in (each.by_value or (each,))]
    assert len(values) == 2


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0, 3),
        torch.tensor(1.0),
        torch.ones(4, 6)[::2, ::3],
        torch.ones(3).expand(2, 3),
        torch.ones(1, 4)[:, 0],
        torch.ones(1, 2, 4)[..., 3],
        torch.tensor([True]),
        torch.tensor([1 + 1j]),
        torch.tensor([1 + 1j]).conj(),
        torch.tensor([1 + 1j]).conj().imag,
        torch.tensor([float("nan")]),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2).to(torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_any_dense_tensor_is_recorded_as_it_is(tensor: Tensor) -> None:
    (graph,) = recorded(lambda x: x.clone(), (tensor,))
    (sample,) = graph.samples
    assert sample[0].dtype is tensor.dtype
    assert sample[0].shape == tensor.shape
    assert str(sample[0]) == str(tensor)
    assert graph.spec.mutated_inputs == ()


class Tagged(Tensor):
    pass


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.ones(2).as_subclass(Tagged),
    ],
    ids=["sparse", "meta", "subclass"],
)
def test_tensors_that_no_runtime_reads_are_refused(tensor: Tensor) -> None:
    assert not plain_tensor(tensor)
    assert problem_of(lambda x: torch.ones(1), ([1, tensor],)).path == "x[1]"


@pytest.mark.parametrize("value", [np.ones(2), object(), {1}, lambda: 0])
def test_arguments_without_value_are_refused_with_their_path(value: object) -> None:
    assert problem_of(lambda x, options: x, (X, {"k": value})).path == "options['k']"


def test_results_that_cannot_be_rebuilt_are_refused_with_their_path() -> None:
    assert problem_of(lambda x: {"y": [x, object()]}, (X,)).path == "out['y'][1]"


def test_module_is_still_run_after_it_was_refused() -> None:
    recording = recording_of(lambda x: x + 1, (np.ones(2),))
    assert recording.record((X,), {}).tolist() == (X + 1).tolist()
    assert recording.calls == []


class Counter(nn.Module):
    count: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.count += 1
        if self.how == "replaced":
            self.count = self.count + 1
        if self.how == "replaced twice":
            self.count = self.count + 1
            self.count = self.count + 1
        return x * 2


@pytest.mark.parametrize("how", ["in place", "replaced", "replaced twice"])
def test_buffers_that_forward_changes_are_refused(how: str) -> None:
    assert problem_of(Counter(how), (X,), (X,)).path == "count"


def _append(x: Tensor, cache: list[Tensor]) -> Tensor:
    cache.append(x)
    return x * 2


def _replace(x: Tensor, cache: list[Tensor]) -> Tensor:
    cache[0] = cache[0] + x
    return cache[0]


def _remove(x: Tensor, cache: list[Tensor]) -> Tensor:
    return x + cache.pop()


def _put(x: Tensor, cache: dict[str, Any]) -> Tensor:
    cache["y"] = x * 2
    return x


@pytest.mark.parametrize(
    ("forward", "make"),
    [
        (_append, lambda: [X]),
        (_replace, lambda: [X]),
        (_remove, lambda: [X]),
        (_put, lambda: {"x": X}),
        (_put, lambda: {"y": X}),
    ],
)
def test_containers_that_forward_changes_are_refused(forward: Any, make: Any) -> None:
    error = problem_of(Function(forward), (X, make()))
    assert error.path == "cache"
    assert "forward changes argument 'cache' itself" in str(error)


def test_containers_that_forward_only_reads_or_copies_are_fine() -> None:
    assert len(recorded(Function(lambda x, cache: _append(x, list(cache))), (X, [X]))) == 1


def test_buffers_that_forward_only_reads_are_fine() -> None:
    assert len(recorded(Counter("not"), (X,))) == 1


@pytest.mark.parametrize(
    ("result", "path", "what"),
    [
        (lambda x: {"y": x, "n": x.shape[0]}, "out['n']", "2, then 4"),
        (lambda x: (x, x if len(x) > 2 else None), "out[1]", "None, then a tensor of float32"),
        (lambda x: x if len(x) > 2 else x.double(), "out", "float64 and 2 dims on cpu, then a"),
        (lambda x: x.sum() if len(x) > 2 else x, "out", "2 dims on cpu, then a tensor of float32"),
        (lambda x: [x] * len(x), "out[2]", "missing, then a tensor of float32 and 2 dims on cpu"),
        (lambda x: [x] if len(x) > 2 else (x,), "out", "of one container, then of another"),
    ],
)
def test_results_of_different_forms_are_told_apart_by_path(
    result: Any, path: str, what: str
) -> None:
    def forward(x: Tensor) -> object:
        return result(x)

    error = problem_of(forward, (X,), (torch.ones(4, 3),))
    assert error.path == path
    assert f"{path!r} is" in str(error)
    assert what in str(error)


def test_calls_under_autocast_are_refused() -> None:
    def forward(x: Tensor) -> Tensor:
        return x

    recording = recording_of(forward)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        recording.record((X,), {})
    assert recording.problem is not None
    assert recording.problem.path == "x"


def test_recorded_inputs_are_copies_from_before_the_call() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    recording = recording_of(lambda x: x.add_(1), (x,))
    (copy,) = recording.calls[0].inputs
    assert copy.tolist() == X.tolist()
    assert not copy.requires_grad
    x.detach().fill_(9)
    assert copy.tolist() == X.tolist()


def test_changed_inputs_are_found_by_their_bits() -> None:
    def forward(x: Tensor, y: Tensor) -> Tensor:
        y.neg_()
        return x * 1

    calls = recording_of(Function(forward), (X.clone(), torch.zeros(1))).calls
    assert calls[0].mutated_inputs == {1}
    nan = torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.ones(1, 2), torch.ones(2))

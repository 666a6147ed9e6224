from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from samples import recorded
from torch import Tensor

from aitune_core import BatchDim, ConfigError, DynamicDim, RecordingError
from aitune_core._graphs import check_dynamic_shapes


def rows(*sizes: int, width: int = 4) -> list[tuple[Tensor]]:
    return [(torch.ones(size, width),) for size in sizes]


def double(x: Tensor) -> Tensor:
    return x * 2


def test_axes_that_never_change_are_static() -> None:
    (graph,) = recorded(double, *rows(2, 2))
    assert graph.spec.inputs[0].shape == (2, 4)
    assert graph.spec.outputs[0].shape == (2, 4)
    assert graph.spec.dims == {}


def test_first_axis_that_changes_is_the_batch_with_the_most_common_size() -> None:
    (graph,) = recorded(double, *rows(2, 5, 2, 3))
    dim = BatchDim(2, 5, 2)
    assert graph.spec.inputs[0].shape == (dim, 4)
    assert graph.spec.outputs[0].shape == (dim, 4)
    assert isinstance(graph.spec.inputs[0].shape[0], BatchDim)


def test_other_axes_get_names_from_their_path() -> None:
    (graph,) = recorded(
        lambda inputs: inputs["ids"] + 1,
        ({"ids": torch.ones(1, 3)},),
        ({"ids": torch.ones(1, 6)},),
    )
    first, second = graph.spec.inputs[0].shape
    assert first == 1
    assert isinstance(second, DynamicDim)
    assert (second.min, second.max, second.opt) == (3, 6, 6)
    assert {"inputs", "ids", "1"} <= set(second.name.split("_"))


def test_axes_share_a_dim_when_their_sizes_change_together_and_are_equal() -> None:
    def forward(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x[:, 0] + y[:, 0]

    (graph,) = recorded(
        forward,
        (torch.ones(2, 4), torch.ones(2, 5), torch.ones(4, 3)),
        (torch.ones(3, 4), torch.ones(3, 7), torch.ones(6, 3)),
    )
    x, y, z = graph.spec.inputs
    assert x.shape[0] == y.shape[0] == BatchDim(2, 3, 3)
    assert y.shape[1] == DynamicDim("y_1", 5, 7, 7)
    # Twice the batch is not the batch, and gets a name of its own.
    assert isinstance(z.shape[0], DynamicDim)
    assert (z.shape[0].min, z.shape[0].max) == (4, 6)
    assert z.shape[0].name not in ("batch", "y_1")
    assert x.shape[1] == 4


def test_static_axes_of_equal_size_share_no_dim() -> None:
    (graph,) = recorded(lambda x, y: x, (torch.ones(3, 3), torch.ones(3, 3)))
    assert [spec.shape for spec in graph.spec.inputs] == [(3, 3), (3, 3)]


@pytest.mark.parametrize(
    "axes",
    [
        {0: BatchDim(1, 64, 8)},
        {-2: BatchDim(1, 64, 8)},
        [BatchDim(1, 64, 8), None],
        [BatchDim(1, 64, 8)],
        (BatchDim(1, 64, 8), 4),
        {0: BatchDim(1, 64, 8), 1: 4},
    ],
)
def test_explicit_dims_in_every_form(axes: Any) -> None:
    (graph,) = recorded(double, *rows(2), dynamic_shapes={"x": axes})
    assert graph.spec.inputs[0].shape == (BatchDim(1, 64, 8), 4)
    assert graph.spec.outputs[0].shape == (BatchDim(1, 64, 8), 4)


def test_explicit_dim_without_opt_takes_the_recorded_size() -> None:
    (graph,) = recorded(double, *rows(2, 3, 3), dynamic_shapes={"x": {0: BatchDim(1, 64)}})
    dim = graph.spec.inputs[0].shape[0]
    assert dim == BatchDim(1, 64, 3)
    assert isinstance(dim, BatchDim)


def test_explicit_dim_of_a_nested_input() -> None:
    (graph,) = recorded(
        lambda inputs: inputs["a"][1] * 2,
        ({"a": [torch.ones(1), torch.ones(2)]},),
        dynamic_shapes={"inputs['a'][1]": {0: DynamicDim("length", 1, 9)}},
    )
    assert graph.spec.inputs[0].shape == (1,)
    assert graph.spec.inputs[1].shape == (DynamicDim("length", 1, 9, 2),)


def test_other_axes_that_move_with_an_explicit_dim_follow_it() -> None:
    (graph,) = recorded(
        lambda x, y: x + y,
        (torch.ones(2), torch.ones(2)),
        (torch.ones(3), torch.ones(3)),
        dynamic_shapes={"x": {0: BatchDim(1, 8, 2)}},
    )
    assert [spec.shape for spec in graph.spec.inputs] == [(BatchDim(1, 8, 2),)] * 2


def test_derived_names_avoid_explicit_ones() -> None:
    (graph,) = recorded(
        lambda x, y: x[:, 0] + y.sum(),
        (torch.ones(2, 3), torch.ones(5)),
        (torch.ones(3, 3), torch.ones(7)),
        dynamic_shapes={"x": {1: DynamicDim("batch", 1, 4)}},
    )
    names = list(graph.spec.dims)
    assert len(names) == len(set(names)) == 3
    assert graph.spec.inputs[0].shape[1] == DynamicDim("batch", 1, 4, 3)


@pytest.mark.parametrize(
    ("shapes", "field", "value"),
    [
        ({"y": {0: BatchDim(1, 4)}}, "dynamic_shapes", "y"),
        ({"x": {2: BatchDim(1, 4)}}, "dynamic_shapes['x']", 2),
        ({"x": {-3: BatchDim(1, 4)}}, "dynamic_shapes['x']", -3),
        ({"x": {0: BatchDim(3, 4)}}, "dynamic_shapes['x']", 2),
        ({"x": {0: BatchDim(1, 1)}}, "dynamic_shapes['x']", 2),
        ({"x": {1: 5}}, "dynamic_shapes['x']", 4),
        ({"x": [None, None, BatchDim(1, 4)]}, "dynamic_shapes['x']", 2),
    ],
)
def test_explicit_dims_that_do_not_fit_the_calls_are_refused(
    shapes: Any, field: str, value: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        recorded(double, *rows(2), dynamic_shapes=shapes)
    assert (caught.value.field, caught.value.value) == (field, value)


def test_unknown_path_error_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        recorded(lambda x, y: x, (torch.ones(1), torch.ones(1)), dynamic_shapes={"z": {}})
    assert caught.value.allowed == ("x", "y")


def test_one_name_for_axes_of_different_recorded_sizes_is_a_contradiction() -> None:
    dim = DynamicDim("d", 1, 9)
    with pytest.raises(ConfigError) as caught:
        recorded(double, *rows(2), dynamic_shapes={"x": {0: dim, 1: dim}})
    assert (caught.value.field, caught.value.value, caught.value.allowed) == (
        "dynamic_shapes",
        4,
        2,
    )


@pytest.mark.parametrize(
    ("shapes", "field"),
    [
        ([], "dynamic_shapes"),
        ({1: {}}, "dynamic_shapes"),
        ({"x": "0"}, "dynamic_shapes['x']"),
        ({"x": 3}, "dynamic_shapes['x']"),
        ({"x": {"0": BatchDim(1, 2)}}, "dynamic_shapes['x']"),
        ({"x": {0: True}}, "dynamic_shapes['x']"),
        ({"x": {0: "batch"}}, "dynamic_shapes['x']"),
        ({"x": {0: BatchDim(1, 2)}, "y": {0: BatchDim(1, 3)}}, "dynamic_shapes"),
        ({"x": [DynamicDim("d", 1, 2, 1), DynamicDim("d", 1, 2, 2)]}, "dynamic_shapes"),
    ],
)
def test_malformed_dynamic_shapes_are_refused_before_recording(shapes: Any, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_dynamic_shapes(shapes)
    assert caught.value.field == field


def test_output_axes_are_told_apart_by_probing() -> None:
    """Both axes had size 2 in the only call, so that recording alone cannot tell them apart."""
    (graph,) = recorded(
        lambda x: (x.t(), torch.cat([x, x]), x.sum(0), x.flatten()),
        (torch.ones(2, 2),),
        dynamic_shapes={"x": [DynamicDim("rows", 1, 8), DynamicDim("columns", 1, 8)]},
    )
    row, column = graph.spec.inputs[0].shape
    transposed, doubled, summed, flat = (spec.shape for spec in graph.spec.outputs)
    assert transposed == (column, row)
    assert summed == (column,)
    assert doubled[1] == column
    for shape in (doubled, flat):
        assert isinstance(shape[0], DynamicDim)
        assert shape[0].name not in ("rows", "columns")


def test_module_that_refuses_the_probe_is_still_recorded() -> None:
    def forward(x: Tensor) -> Tensor:
        if x.shape[0] != 2:
            msg = "two rows only"
            raise ValueError(msg)
        return x * 2

    (graph,) = recorded(forward, *rows(2), dynamic_shapes={"x": {0: BatchDim(1, 8)}})
    assert graph.spec.inputs[0].shape[0] == BatchDim(1, 8, 2)


def test_result_whose_rank_depends_on_a_size_is_refused_and_does_not_crash() -> None:
    dims = {"x": [DynamicDim("a", 1, 2), DynamicDim("b", 1, 2)]}
    with contextlib.suppress(RecordingError):
        (graph,) = recorded(lambda x: x.squeeze(), (torch.ones(2, 2),), dynamic_shapes=dims)
        assert graph.spec.outputs[0].rank == 2


def test_outputs_have_paths_dtypes_and_names() -> None:
    (graph,) = recorded(lambda x: {"a": (x, x.int()), "n": 3}, *rows(2))
    assert [(spec.path, spec.dtype) for spec in graph.spec.outputs] == [
        ("out['a'][0]", torch.float32),
        ("out['a'][1]", torch.int32),
    ]
    names = [spec.name for spec in (*graph.spec.inputs, *graph.spec.outputs)]
    assert len(set(names)) == len(names)


def test_changed_inputs_are_further_outputs() -> None:
    def forward(x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(x)
        return x * 2

    (graph,) = recorded(forward, (torch.ones(2), torch.zeros(2)))
    assert graph.spec.mutated_inputs == (1,)
    assert graph.spec.result_count == 1
    assert [spec.path for spec in graph.spec.outputs] == ["out", "cache"]
    outputs = graph.flat_module(torch.ones(2), torch.full((2,), 5.0))
    assert [output.tolist() for output in outputs] == [[2.0, 2.0], [6.0, 6.0]]


def test_flat_module_leaves_its_inputs_alone() -> None:
    (graph,) = recorded(lambda x: x.add_(1), *rows(2))
    x = torch.zeros(2, 4)
    outputs = graph.flat_module(x)
    assert x.tolist() == torch.zeros(2, 4).tolist()
    assert len({output.data_ptr() for output in outputs}) == 2 or len(outputs) == 2


def test_flat_module_leaves_training_flags_of_parts_alone() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
    net.eval()
    net[1].training = True
    (graph,) = recorded(lambda x: net[0](x), *rows(2))
    assert not graph.flat_module.training
    assert net[1].training


def test_arguments_are_copies_in_the_form_of_the_call() -> None:
    (graph,) = recorded(lambda x, *, y=None: x, ((torch.ones(2),), {"y": [torch.zeros(1), "s"]}))
    args, kwargs = graph.arguments(graph.samples[0])
    assert args == ()
    assert kwargs["y"][1] == "s"
    kwargs["x"].add_(1)
    assert graph.samples[0][0].tolist() == [1.0, 1.0]


def attend(x: Tensor, mask: Tensor, past: Tensor) -> Tensor:
    """Refuse a mask that is not as long as past and new rows together."""
    rows = torch.cat([past, x], 1)
    return (x @ rows.transpose(1, 2) + mask[:, None]) @ rows


def step(batch: int, new: int, past: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones(batch, new, 2), torch.ones(batch, new + past), torch.ones(batch, past, 2)


def texts(*calls: Any, **options: Any) -> list[str]:
    (graph,) = recorded(*calls, **options)
    return [condition.text for condition in graph.spec.conditions]


def test_length_that_is_a_sum_of_others_is_a_condition_with_the_range_that_follows() -> None:
    (graph,) = recorded(attend, step(1, 1, 4), step(2, 3, 9), step(3, 2, 30))
    spec = graph.spec
    assert [condition.text for condition in spec.conditions] == ["mask_1 == x_1 + past_1"]
    assert (spec.dims["mask_1"].min, spec.dims["mask_1"].max) == (1 + 4, 3 + 30)


@pytest.mark.parametrize(
    ("function", "sizes", "expected"),
    [
        (
            lambda x, y: torch.cat([x, x[:1]]) + y,
            [(2, 3), (4, 5), (9, 10)],
            "batch_2 == batch + 1",
        ),
        (lambda x, y: x.repeat(3) + y, [(2, 6), (4, 12), (9, 27)], "batch_2 == batch * 3"),
        (
            lambda x, y: x[: len(x) // 4 * 4].unflatten(0, (-1, 4)).sum(1) + y,
            [(9, 2), (18, 4), (40, 10)],
            "batch_2 == batch // 4",
        ),
    ],
    ids=["offset", "multiple", "share"],
)
def test_length_that_follows_from_another(
    function: Any, sizes: list[tuple[int, int]], expected: str
) -> None:
    calls = [tuple(torch.ones(size) for size in pair) for pair in sizes]
    assert texts(function, *calls) == [expected]


def test_length_that_is_a_product_of_others() -> None:
    calls = [(torch.ones(a, b, 2), torch.ones(a * b, 2)) for a, b in ((2, 8), (3, 10), (5, 7))]
    assert texts(lambda x, y: x.flatten(0, 1) + y, *calls) == ["batch_2 == batch * x_1"]


def test_relation_by_chance_is_none_where_the_module_takes_other_sizes() -> None:
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x.sum() + y

    calls = [(torch.ones(size), torch.ones(size + 1)) for size in (2, 4, 9)]
    assert texts(forward, *calls) == []


def test_declared_range_of_a_length_that_follows_stays() -> None:
    (graph,) = recorded(
        attend, step(1, 1, 4), step(2, 3, 9), dynamic_shapes={"mask": {1: DynamicDim("m", 1, 99)}}
    )
    assert [condition.text for condition in graph.spec.conditions] == ["m == x_1 + past_1"]
    assert (graph.spec.dims["m"].min, graph.spec.dims["m"].max) == (1, 99)


def test_derived_names_are_written_as_python_reads_them() -> None:
    calls: list[Any] = [(({"\ufb01ne": torch.ones(2, size)},), {}) for size in (3, 5)]
    (graph,) = recorded(lambda inputs: inputs["\ufb01ne"] * 2, *calls)
    assert list(graph.spec.dims) == ["inputs_fine__1"]

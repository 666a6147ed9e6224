from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aitune_core import BatchDim, ConfigError, DynamicDim, GraphSpec, InputMismatchError, TensorSpec
from aitune_core._trees import HOLE
from aitune_core.conditions import FUNCTION_NAMES
from aitune_core.specs import dtype_name

BATCH = BatchDim(1, 4)
LENGTH = DynamicDim("length", 2, 8)


def tensor_spec(
    path: str, *shape: int | DynamicDim, dtype: torch.dtype = torch.float32
) -> TensorSpec:
    return TensorSpec(name=path, path=path, dtype=dtype, shape=shape)


def graph(*inputs: TensorSpec) -> GraphSpec:
    structure = tuple(HOLE for _ in inputs)
    return GraphSpec(
        name="g", inputs=inputs, outputs=(), call_structure=structure, result_structure=HOLE
    )


TWO = graph(
    tensor_spec("x", BATCH, LENGTH, 3), tensor_spec("mask", BATCH, LENGTH, dtype=torch.bool)
)


def test_dtype_names_have_no_prefix() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        *((name, "a Python identifier") for name in ("", "a b", "1a", "a-b", None, 3, b"a")),
        *((name, "no keyword") for name in ("True", "None", "if", "lambda")),
        *((name, "none of the functions") for name in FUNCTION_NAMES),
        ("\ufb01ne", "'fine'"),
        ("\u2115", "'N'"),
    ],
)
def test_dim_name_must_be_one_that_conditions_can_use(name: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        DynamicDim(name, 1, 2)
    assert caught.value.field == "name"
    assert caught.value.value == name


@pytest.mark.parametrize(
    ("field", "sizes"),
    [
        ("min", (-1, 2, None)),
        ("min", (True, 2, None)),
        ("min", (1.0, 2, None)),
        ("max", (1, "2", None)),
        ("max", (1, None, None)),
        ("opt", (1, 2, 1.5)),
        ("opt", (1, 2, False)),
    ],
)
def test_dim_sizes_must_be_integers(field: str, sizes: tuple[Any, Any, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        DynamicDim("d", *sizes)
    assert caught.value.field == field
    with pytest.raises(ConfigError) as caught:
        BatchDim(*sizes)
    assert caught.value.field == field


@given(st.integers(0, 9), st.integers(0, 9), st.none() | st.integers(0, 9))
def test_dim_accepts_exactly_ordered_sizes(low: int, high: int, opt: int | None) -> None:
    ordered = low <= (low if opt is None else opt) <= high
    if ordered:
        dim = DynamicDim("d", low, high, opt)
        assert (dim.name, dim.min, dim.max, dim.opt) == ("d", low, high, opt)
    else:
        with pytest.raises(ConfigError) as caught:
            DynamicDim("d", low, high, opt)
        assert caught.value.value == (low, opt, high)


def test_batch_dim_with_one_number_says_that_max_is_left_out() -> None:
    with pytest.raises(ConfigError, match=r"the default of max; .*BatchDim\(1, 8\)") as caught:
        BatchDim(8)
    assert (caught.value.field, caught.value.value) == ("max", (8, None, 1))
    assert BatchDim() == BatchDim(1, 1)


def test_dims_compare_by_value_and_are_hashable() -> None:
    assert DynamicDim("a", 1, 2) == DynamicDim("a", 1, 2)
    assert len({DynamicDim("a", 1, 2), DynamicDim("a", 1, 2), DynamicDim("a", 1, 3)}) == 2
    assert str(LENGTH) == "length[2..8]"


def test_batch_dim_is_a_dynamic_dim_with_a_name() -> None:
    assert isinstance(BATCH, DynamicDim)
    assert (BATCH.name, BATCH.min, BATCH.max, BATCH.opt) == ("batch", 1, 4, None)
    assert BatchDim(2, 3, 3, name="rows").name == "rows"


def test_dims_cannot_be_changed_after_validation() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        LENGTH.max = 1  # type: ignore[misc]


def test_tensor_spec_describes_its_axes() -> None:
    spec = TWO.inputs[0]
    assert spec.rank == 3
    assert spec.dynamic_axes == {0: BATCH, 1: LENGTH}
    assert str(spec) == "x: float32(batch[1..4], length[2..8], 3) on cpu"


def test_sizes_puts_dims_in_and_is_none_where_one_is_missing() -> None:
    spec = TWO.inputs[0]
    assert spec.sizes({"batch": 2, "length": 5, "other": 9}) == (2, 5, 3)
    assert spec.sizes({"batch": 0, "length": 0}) == (0, 0, 3)
    assert spec.sizes({"batch": 2}) is None
    assert tensor_spec("x").sizes({}) == ()


def test_tensor_spec_checks_its_dtype() -> None:
    with pytest.raises(TypeError):
        tensor_spec("x", 1, dtype="float32")  # type: ignore[arg-type]


def test_graph_lists_dims_once_in_order_of_appearance() -> None:
    assert list(TWO.dims.items()) == [("batch", BATCH), ("length", LENGTH)]


def test_graph_reads_dim_sizes_off_inputs() -> None:
    inputs = (torch.zeros(2, 5, 3), torch.zeros(2, 5, dtype=torch.bool))
    assert TWO.dim_sizes(inputs) == {"batch": 2, "length": 5}


def test_results_are_the_outputs_without_changed_inputs() -> None:
    outputs = (tensor_spec("out", 1), tensor_spec("x", 1))
    assert attrs.evolve(TWO, outputs=outputs, mutated_inputs=(0,)).result_count == 1


@pytest.mark.parametrize(("batch", "length"), [(1, 2), (4, 8), (2, 3)])
def test_fitting_inputs_pass(batch: int, length: int) -> None:
    TWO.check_inputs((torch.zeros(batch, length, 3), torch.zeros(batch, length, dtype=torch.bool)))


MASK = torch.zeros(2, 5, dtype=torch.bool)


@pytest.mark.parametrize(
    ("inputs", "path", "expected", "got"),
    [
        ((torch.zeros(2, 5, 3),), None, 2, 1),
        ((torch.zeros(2, 5, 3).double(), MASK), "x", "float32", "float64"),
        ((torch.zeros(2, 5), MASK), "x", 3, 2),
        ((torch.zeros(2, 5, 3, device="meta"), MASK), "x", "cpu", "meta"),
        ((torch.zeros(2, 5, 4), MASK), "x", 3, 4),
        ((torch.zeros(5, 5, 3), MASK), "x", "batch[1..4]", 5),
        ((torch.zeros(0, 5, 3), MASK), "x", "batch[1..4]", 0),
        ((torch.zeros(2, 9, 3), MASK), "x", "length[2..8]", 9),
        ((torch.zeros(2, 5, 3), torch.zeros(3, 5, dtype=torch.bool)), "mask", 2, 3),
        ((torch.zeros(2, 5, 3), torch.zeros(2, 6, dtype=torch.bool)), "mask", 5, 6),
    ],
)
def test_mismatch_names_input_and_what_was_expected(
    inputs: tuple[Tensor, ...], path: str | None, expected: object, got: object
) -> None:
    with pytest.raises(InputMismatchError) as caught:
        TWO.check_inputs(inputs)
    assert (caught.value.path, caught.value.expected, caught.value.got) == (path, expected, got)


def test_one_dim_twice_in_an_input_must_have_one_size() -> None:
    square = graph(tensor_spec("x", LENGTH, LENGTH))
    square.check_inputs((torch.zeros(3, 3),))
    with pytest.raises(InputMismatchError) as caught:
        square.check_inputs((torch.zeros(3, 4),))
    assert (caught.value.path, caught.value.expected, caught.value.got) == ("x", 3, 4)

from __future__ import annotations

from typing import Any

import pytest
import torch

from aitune_core import ConfigError
from aitune_core._tolerances import (
    TF32_TOLERANCE,
    check_tolerance,
    check_tolerance_paths,
    derived_tolerance,
    given_tolerance,
    tolerance,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def derived(dtype: torch.dtype, device: torch.device = CPU, **facts: Any) -> float:
    return derived_tolerance(dtype, device, **facts)


@pytest.mark.parametrize("dtype", FLOATS)
def test_grows_with_eagers_own_error(dtype: torch.dtype) -> None:
    none, some = (derived(dtype, own=dtype, eager_error=error) for error in (0.0, 1e-3))
    assert some == pytest.approx(none + 4e-3)
    assert torch.finfo(dtype).eps < none < tolerance(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64, torch.complex64, torch.float8_e5m2])
def test_is_that_of_two_kernels_where_eager_is_the_reference(dtype: torch.dtype) -> None:
    assert derived(dtype) == tolerance(dtype)
    assert derived(dtype, own=torch.float32) == tolerance(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_is_never_less_than_that_on_cuda_and_for_values_that_were_not_recorded(
    dtype: torch.dtype,
) -> None:
    assert derived(dtype, CUDA, own=dtype, eager_error=0.0) == tolerance(dtype)
    assert derived(dtype, own=dtype, eager_error=0.0, recorded=False) == tolerance(dtype)
    assert derived(dtype, CUDA, own=dtype, eager_error=0.1) > 0.4


def test_tf32_counts_where_it_is_allowed() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert derived(torch.float32, CUDA, own=torch.float32, eager_error=0.0) == TF32_TOLERANCE
        assert derived(torch.float32, own=torch.float32, eager_error=0.0) < TF32_TOLERANCE
    finally:
        torch.set_float32_matmul_precision(before)


def test_coarser_type_of_the_candidate_counts() -> None:
    allowed = derived(torch.float32, computes=torch.float16, own=torch.float32, eager_error=1e-7)
    assert allowed == tolerance(torch.float16)


def test_float32_results_of_half_precision_are_allowed_what_that_rounds() -> None:
    allowed = derived(torch.float32, own=torch.bfloat16, eager_error=0.0)
    assert allowed == derived(torch.bfloat16, own=torch.bfloat16, eager_error=0.0)


def test_float64_results_of_float32_are_not() -> None:
    assert derived(torch.float64, own=torch.float32, eager_error=0.0) == tolerance(torch.float64)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integers_are_equal_whatever_is_known(dtype: torch.dtype) -> None:
    assert derived(dtype, own=torch.float32, eager_error=1e-3, computes=torch.float16) == 0.0


def test_given_number_counts_for_all_outputs_and_given_paths_for_theirs() -> None:
    assert given_tolerance(1e-3, "out") == 1e-3
    assert given_tolerance({"out": 1e-3}, "out") == 1e-3
    assert given_tolerance({"out": 1e-3}, "other") is None
    assert given_tolerance(None, "out") is None


@pytest.mark.parametrize("given", [None, 0, 0.0, 1e-3, {}, {"out": 1}])
def test_numbers_and_mappings_are_taken(given: Any) -> None:
    check_tolerance(given)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (-1, "tolerance"),
        (float("nan"), "tolerance"),
        (float("inf"), "tolerance"),
        (True, "tolerance"),
        ("0.1", "tolerance"),
        ([0.1], "tolerance"),
        ({"out": -1.0}, "tolerance['out']"),
        ({3: 0.1}, "tolerance[3]"),
    ],
)
def test_everything_else_is_refused_by_name(given: Any, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_tolerance(given)
    assert caught.value.field == field


def test_unknown_path_lists_those_that_are_known() -> None:
    check_tolerance_paths({"b": 0.1}, ["b", "a"])
    check_tolerance_paths(0.1, [])
    with pytest.raises(ConfigError, match="'c'; the outputs are a, b") as caught:
        check_tolerance_paths({"c": 0.1}, ["b", "a", "a"])
    assert caught.value.allowed == ["a", "b"]

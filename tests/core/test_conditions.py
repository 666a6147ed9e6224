from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import with_dims

from aitune_core import (
    BatchDim,
    ConfigError,
    DynamicDim,
    GraphSpec,
    InputMismatchError,
    SizeCondition,
)
from aitune_core._spec_json import graph_from_json, graph_to_json


@pytest.mark.parametrize(
    ("text", "sizes", "holds"),
    [
        ("n % 4 == 0", {"n": 8}, True),
        ("n % 4 == 0", {"n": 9}, False),
        ("a + b * 2 - 1 == c // 3", {"a": 2, "b": 3, "c": 22}, True),
        ("a != b", {"a": 3, "b": 3}, False),
        ("1 < n <= 5", {"n": 5}, True),
        ("1 < n <= 5", {"n": 1}, False),
        ("n > 3 and not m == 2 or n == 1", {"n": 1, "m": 2}, True),
        ("n > 3 and not m == 2 or n == 1", {"n": 4, "m": 2}, False),
        ("trunc(float(n) ** 0.5) ** 2 == n", {"n": 49}, True),
        ("trunc(float(n) ** 0.5) ** 2 == n", {"n": 50}, False),
        ("max(a, b) - min(a, b) < 2", {"a": 5, "b": 6}, True),
        ("ceil(n / 2) == floor(n / 2) + 1", {"n": 7}, True),
        ("(a if b == 1 else -a) > 0", {"a": 2, "b": 2}, False),
        ("round(n * 0.3) == 2 and sqrt(n) > abs(-2) and int(2.9) == 2", {"n": 7}, True),
    ],
)
def test_condition_reads_as_in_python(text: str, sizes: dict[str, int], holds: bool) -> None:
    condition = SizeCondition(text)
    assert condition.holds(sizes) is holds
    assert condition.dims == set(sizes)
    assert str(condition) == text


@pytest.mark.parametrize("text", ["4 // n == 1", "4 % n == 1", "sqrt(n - 1) == 0", "1 / n > 0"])
def test_condition_without_a_value_is_not_met(text: str) -> None:
    assert not SizeCondition(text).holds({"n": 0})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n ==",
        "n = 3",
        "__import__('os')",
        "n.bit_length() > 3",
        "n[0] == 1",
        "'n' == n",
        "[n] == [n]",
        "lambda: n",
        "n ** m == 2",
        "2 ** 999999999 > n",
        "n ** -1 > 0",
        "pow(n, 9) > 1",
        "max(*n) > 1",
        "round(n, ndigits=1) == 1",
        "max(n) > 1",
        "min() > 1",
        "int() == n",
        "floor(n, 2) > 1",
        "n in (1, 2)",
        "n is 1",
        "n & 1 == 0",
        "n << 9 > 1",
        "-" * 100 + "n == 0",
        "n == 0 or " * 1000 + "n == 0",
        "(" * 300 + "n" + ")" * 300,
        "n == 0\nn == 1",
        "n == \0",
        3,
        None,
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a condition on sizes") as caught:
        SizeCondition(text)
    assert caught.value.field == "text"


@given(st.text(max_size=40))
def test_no_text_does_worse_than_be_refused(text: str) -> None:
    try:
        condition = SizeCondition(text)
    except ConfigError:
        return
    assert condition.holds(dict.fromkeys(condition.dims, 3)) in {True, False}


def test_expression_without_a_number_for_a_value_is_not_met() -> None:
    assert not SizeCondition("(0 - n) ** 0.5 > 1").holds({"n": 3})


def test_definition_names_its_dim_and_gives_its_size() -> None:
    condition = SizeCondition("mask == past + new")
    assert condition.defined == "mask"
    assert condition.defined_size({"past": 4, "new": 2}) == 6
    for text in ("past + new == mask", "n == n + m", "n != m", "n == m == k", "n == m and n == k"):
        assert SizeCondition(text).defined is None
        with pytest.raises(ValueError, match="defines no dim"):
            SizeCondition(text).defined_size({})
    with pytest.raises(ValueError, match="gives no size"):
        SizeCondition("n == 4 // m").defined_size({"m": 0})


def test_numbers_are_those_in_the_text() -> None:
    assert sorted(SizeCondition("n % 4 == 0 or n > 77").numbers) == [0, 4, 77]


def graph(*conditions: str) -> GraphSpec:
    return with_dims(BatchDim(1, 8), DynamicDim("length", 2, 90), conditions=conditions)


def test_graph_refuses_inputs_that_break_a_condition() -> None:
    spec = graph("length % 4 == 0", "length != batch")
    spec.check_inputs([torch.ones(2, 16)])
    with pytest.raises(InputMismatchError) as caught:
        spec.check_inputs([torch.ones(2, 18)])
    assert (caught.value.path, caught.value.expected) == ("x", "length % 4 == 0")
    assert caught.value.got == {"length": 18}
    assert str(caught.value) == (
        "the tuned graph takes sizes with length % 4 == 0; here length is 18 (input 'x' axis 1)"
    )
    with pytest.raises(InputMismatchError, match="length != batch"):
        spec.check_inputs([torch.ones(4, 4)])


def test_graph_refuses_conditions_on_dims_that_it_has_not() -> None:
    with pytest.raises(ConfigError, match=r"names 'width', its dims are \['batch', 'length'\]"):
        graph("width > 2")


def test_conditions_are_stored_with_the_graph() -> None:
    spec = graph("length % 4 == 0", "length != batch")
    data = graph_to_json(spec)
    assert data["conditions"] == ["length % 4 == 0", "length != batch"]
    assert graph_from_json(data) == spec
    with pytest.raises(ValueError, match="not a condition on sizes"):
        graph_from_json({**data, "conditions": ["__import__('os').system('true')"]})

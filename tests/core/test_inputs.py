from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from treedata import Plain, same

from aitune_core import ConfigError
from aitune_core._inputs import calls_of, resized_call, to_device

X, Y = torch.ones(2, 3), torch.zeros(2, 3)


def generated() -> Iterator[Tensor]:
    yield X
    yield Y


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (X, [((X,), {})]),
        ((X, Y), [((X, Y), {})]),
        ({"x": X}, [((), {"x": X})]),
        (OrderedDict(x=X), [((), {"x": X})]),
        (((X,), {"y": Y}), [((X,), {"y": Y})]),
        (([X], {"y": Y}), [((X,), {"y": Y})]),
        ((X, {"y": Y}), [((X, {"y": Y}), {})]),
        ((), [((), {})]),
        ([X, Y], [((X,), {}), ((Y,), {})]),
        ([(X, Y), [Y, X]], [((X, Y), {}), ((Y, X), {})]),
        ([{"x": X}, ((X,), {"y": 1})], [((), {"x": X}), ((X,), {"y": 1})]),
        ([1, None], [((1,), {}), ((None,), {})]),
        ([], []),
    ],
)
def test_calls_are_read_from_every_form(data: Any, expected: list[Any]) -> None:
    assert same(list(calls_of(data, None)), expected)


def test_calls_are_read_from_a_generator_only_as_far_as_wanted() -> None:
    source = generated()
    assert same(list(calls_of(source, 1)), [((X,), {})])
    assert next(source) is Y


def test_calls_are_read_from_a_data_loader() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4.0), torch.arange(4)), batch_size=2)
    calls = list(calls_of(loader, None))
    assert [[tensor.tolist() for tensor in args] for args, _ in calls] == [
        [[0.0, 1.0], [0, 1]],
        [[2.0, 3.0], [2, 3]],
    ]
    assert all(kwargs == {} for _, kwargs in calls)


@pytest.mark.parametrize("data", [None, 3, "text", b"bytes", torch.nn.Linear(1, 1)])
def test_what_holds_no_calls_is_refused(data: object) -> None:
    with pytest.raises(ConfigError) as caught:
        list(calls_of(data, None))
    assert caught.value.field == "input_data"


def test_mapping_with_other_keys_is_no_call() -> None:
    with pytest.raises(ConfigError) as caught:
        list(calls_of({1: X}, None))
    assert (caught.value.field, caught.value.value) == ("input_data", 1)


def test_resized_call_slices_and_repeats_tensors_of_the_batch() -> None:
    x, other, scalar = torch.arange(3), torch.arange(5), torch.tensor(7)
    call = ((x, [other]), {"s": scalar, "y": x.unsqueeze(1), "n": 4})
    (large, [kept]), kwargs = resized_call(call, 7)
    assert large.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert kept is other
    assert kwargs["s"] is scalar
    assert kwargs["y"].shape == (7, 1)
    assert kwargs["n"] == 4
    (small, _), _ = resized_call(call, 1)
    assert small.tolist() == [0]
    assert x.tolist() == [0, 1, 2]


@pytest.mark.parametrize("call", [((), {}), ((torch.zeros(0, 2),), {}), ((torch.tensor(1),), {})])
def test_calls_without_rows_cannot_be_resized(call: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        resized_call(call, 2)
    assert (caught.value.field, caught.value.value) == ("batch_sizes", 2)


def test_to_device_moves_tensors_and_keeps_the_rest() -> None:
    args, kwargs = to_device(((X, 3), {"y": [Y]}), torch.device("meta"))
    assert args[0].device.type == "meta"
    assert args[1] == 3
    assert kwargs["y"][0].device.type == "meta"


def test_tensors_in_plain_dataclasses_are_moved_and_resized() -> None:
    call: Any = ((Plain(X, 3), {"y": [Y]}), {})
    ((moved, rest), _) = to_device(call, torch.device("meta"))
    assert isinstance(moved, Plain)
    assert moved.first.device.type == rest["y"][0].device.type == "meta"
    ((longer, _), _) = resized_call(call, 5)
    assert longer.first.shape == (5, 3)

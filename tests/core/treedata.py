"""Containers and random nested structures for the tests of trees."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch.utils import _pytree as pytree


class Point(NamedTuple):
    x: Any
    y: Any = None


class StoredPoint(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Plain:
    first: Any
    second: Any = 1


@dataclasses.dataclass
class Registered:
    first: Any
    second: Any


class Output(OrderedDict[str, Any]):
    """As the outputs of transformers: fields that are None are left out."""

    def __init__(self, **fields: Any) -> None:
        super().__init__({name: value for name, value in fields.items() if value is not None})


class Color(enum.Enum):
    RED = 1
    BLUE = 2


torch.export.register_dataclass(Registered, serialized_type_name="treedata.Registered")
pytree._register_namedtuple(StoredPoint, serialized_type_name="treedata.StoredPoint")
pytree.register_pytree_node(
    Output,
    lambda value: (list(value.values()), list(value)),
    lambda children, names: Output(**dict(zip(names, children, strict=True))),
    serialized_type_name="treedata.Output",
    flatten_with_keys_fn=lambda value: (
        [(pytree.MappingKey(name), child) for name, child in value.items()],
        list(value),
    ),
)

tensors = st.integers(0, 99).map(lambda value: torch.tensor(value))
stored_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.sampled_from([torch.float16, torch.int8, torch.device("cpu"), torch.strided]),
)
values = stored_values | st.sampled_from([Color.RED, slice(1, None), range(3), b"x", int])
keys = st.text(max_size=3) | st.integers(0, 9) | st.booleans()


def trees(leaves: st.SearchStrategy[Any], *, stored: bool) -> st.SearchStrategy[Any]:
    """Return nested containers; ``stored`` leaves out those that no checkpoint can hold."""

    def extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        forms = [
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(keys, inner, max_size=3),
            st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict),
            st.builds(StoredPoint, inner, inner),
            st.builds(Registered, inner, inner),
            st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3).map(
                lambda fields: Output(**fields)
            ),
        ]
        if not stored:
            forms += [st.builds(Point, inner, inner), st.builds(Plain, inner, inner)]
        return st.one_of(forms)

    return st.recursive(leaves, extend, max_leaves=8)


def same(first: Any, second: Any) -> bool:
    """Whether two trees have the same types, the same tensors (by identity) and equal values."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first is second
    if isinstance(first, float | complex):
        return repr(first) == repr(second)
    if isinstance(first, dict):
        pairs = zip(first.items(), second.items(), strict=False)
        return len(first) == len(second) and all(
            type(a) is type(b) and a == b and same(x, y) for (a, x), (b, y) in pairs
        )
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        return same(vars(first), vars(second))
    return bool(first == second)

"""Trees: nested calls and results taken apart into tensors and a structure, and put together.

A *structure* is a nested, hashable tuple. Tensors leave a `HOLE` in it; every other leaf stays
in it by value, so two calls have equal structures exactly when they differ in tensors alone.
Containers are those of torch's pytree registry, plus dataclasses that nobody registered.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import attrs
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = [
    "HOLE",
    "SCALAR_HOLE",
    "Context",
    "Omitted",
    "Structure",
    "TreeError",
    "array_problem",
    "flatten",
    "hole_paths",
    "leaf_paths",
    "map_leaves",
    "unflatten",
]

Structure: TypeAlias = tuple[Any, ...]

#: Place of a tensor.
HOLE: Final[Structure] = ("*",)
#: Tag of the place of a number that was made an input: ``(SCALAR_HOLE, int)``.
SCALAR_HOLE: Final = "#"

_VALUE: Final = "="
_LEAF_TAGS: Final = frozenset({"*", SCALAR_HOLE, _VALUE})
_NODE: Final = "node"
_DATACLASS: Final = "dataclass"
_PLAIN_VALUES: Final = (type(None), bool, int, str)
_KEY_TYPES: Final = (str, int, bool)
_SEQUENCES: Final = {"tuple": tuple, "list": list}
#: Values that stay the same for good and compare by value.
_VALUE_TYPES: Final = (
    bytes,
    complex,
    float,
    enum.Enum,
    range,
    slice,
    type,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


class Omitted(enum.Enum):
    """Stands for an argument that was left to a default which cannot be part of a graph."""

    OMITTED = "omitted"


@attrs.define
class TreeError(Exception):
    """A leaf or container that cannot be part of a graph; callers make it a public error."""

    reason: str
    path: str = ""


@attrs.frozen
class Context:
    """Hashable stand-in for a pytree context, compared by its representation."""

    value: Any = attrs.field(eq=False)
    key: str


def flatten(value: Any, leaves: list[Tensor], path: str = "") -> Structure:  # noqa: ANN401
    """Append the tensors of ``value`` to ``leaves`` in order and return the structure.

    Args:
        value: A tensor, a plain value or a nested container of them.
        leaves: Receives the tensors, depth first.
        path: Path of ``value``, used in errors.

    Raises:
        TreeError: A leaf has no value identity (an array, an arbitrary object) or a container
            has no registered way to take it apart.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        leaves.append(value)
        return HOLE
    if kind in _PLAIN_VALUES:
        return (_VALUE, kind, value)
    if kind in _SEQUENCES.values():
        children = tuple(
            flatten(item, leaves, f"{path}[{position}]") for position, item in enumerate(value)
        )
        return (kind.__name__, children)
    if kind is dict:
        return _flatten_dict(value, leaves, path)
    return _flatten_other(value, leaves, path)


def _flatten_dict(value: dict[Any, Any], leaves: list[Tensor], path: str) -> Structure:
    # Insertion order is part of the structure: a module may iterate over the dict.
    for key in value:
        if type(key) not in _KEY_TYPES:
            reason = f"dict key {key!r} is a {type(key).__name__}; keys must be str, int or bool"
            raise TreeError(reason, path)
    children = tuple(flatten(item, leaves, f"{path}[{key!r}]") for key, item in value.items())
    return ("dict", tuple((type(key), key) for key in value), children)


def _flatten_other(value: object, leaves: list[Tensor], path: str) -> Structure:
    kind = type(value)
    if isinstance(value, _VALUE_TYPES):
        return (_VALUE, kind, _comparable(value))
    if isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat):
        return _symbolic(value)
    node = _node_def(kind)
    if node is not None:
        children, context = node.flatten_fn(value)
        names = _child_paths(node, value, len(children), path)
        parts = tuple(
            flatten(child, leaves, name) for child, name in zip(children, names, strict=True)
        )
        return (_NODE, kind, Context(context, repr(context)), parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = tuple(field.name for field in dataclasses.fields(value))
        others = [
            name
            for name in getattr(value, "__dict__", ())
            if name not in fields
            and not isinstance(getattr(kind, name, None), functools.cached_property)
        ]
        if others:
            reason = f"{kind.__qualname__} has the attribute {others[0]!r}, which is no field of it"
            raise TreeError(reason, path)
        parts = tuple(flatten(getattr(value, name), leaves, f"{path}.{name}") for name in fields)
        return (_DATACLASS, kind, fields, parts)
    if isinstance(value, Mapping):
        reason = (
            f"{kind.__qualname__} is a mapping that torch's pytree does not know; pass it as "
            "keyword arguments (**value) or as a dict, or register it with "
            "torch.utils._pytree.register_pytree_node"
        )
        raise TreeError(reason, path)
    array = array_problem(value)
    if array is not None:
        what, step = array
        reason = f"it is {what}; {step}"
        raise TreeError(reason, path)
    reason = (
        f"{kind.__module__}.{kind.__qualname__} is neither a tensor, nor a value that compares by "
        "value, nor a container that torch's pytree knows; convert it to a tensor, or register it "
        "with torch.utils._pytree.register_pytree_node"
    )
    raise TreeError(reason, path)


def array_problem(value: object) -> tuple[str, str] | None:
    """Return what an array or number of NumPy is, and what to give instead; None for others."""
    # By what it has, since NumPy need not be installed.
    if not hasattr(value, "__array_interface__"):
        return None
    what = f"a {type(value).__module__}.{type(value).__qualname__}"
    if type(value).__name__ == "ndarray":
        return what, "give a tensor: torch.from_numpy(array)"
    return what, "give a tensor, or a number of Python: item()"


def _symbolic(value: torch.SymInt | torch.SymBool | torch.SymFloat) -> Structure:
    """Return a number that an exporter follows; comparing it tells the exporter what it must be."""
    if isinstance(value, torch.SymFloat):
        return (_VALUE, float, _comparable(float(value)))
    return (_VALUE, int if isinstance(value, torch.SymInt) else bool, value)


def _comparable(value: object) -> object:
    """Return something hashable that is equal for the same value only."""
    if isinstance(value, float):
        return Context(value, value.hex())  # tells -0.0 from 0.0, and NaN equals NaN
    if isinstance(value, complex | slice):
        return Context(value, repr(value))
    return value


def _node_def(kind: type) -> pytree.NodeDef | None:
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is None and pytree.is_namedtuple_class(kind):
        # The registry knows all of them under the function that makes them.
        return pytree.SUPPORTED_NODES[collections.namedtuple]  # type: ignore[index]  # noqa: PYI024
    return node


def _child_paths(node: pytree.NodeDef, value: object, count: int, path: str) -> list[str]:
    if node.flatten_with_keys_fn is None:
        return [f"{path}<{position}>" for position in range(count)]
    pairs, _ = node.flatten_with_keys_fn(value)
    return [f"{path}{pytree.keystr((key,))}" for key, _ in pairs]


def unflatten(structure: Structure, leaves: Iterator[Any]) -> Any:  # noqa: ANN401
    """Build the value that ``structure`` describes, taking one leaf per hole."""
    tag = structure[0]
    if tag in {"*", SCALAR_HOLE}:
        return next(leaves)
    if tag == _VALUE:
        value: Any = structure[2]
        return value.value if type(value) is Context else value
    if tag == "dict":
        return {
            key: unflatten(child, leaves)
            for (_, key), child in zip(structure[1], structure[2], strict=True)
        }
    sequence = _SEQUENCES.get(tag)
    if sequence is not None:
        return sequence([unflatten(child, leaves) for child in structure[1]])
    kind, context = structure[1], structure[2]
    parts = [unflatten(child, leaves) for child in structure[3]]
    if tag == _DATACLASS:
        return _rebuild_dataclass(kind, context, parts)
    node = _node_def(kind)
    assert node is not None, "a structure is made from registered containers only"  # noqa: S101
    return node.unflatten_fn(parts, context.value)


def _rebuild_dataclass(kind: type, names: Sequence[str], parts: Sequence[object]) -> object:
    # Not through __init__: fields may be init=False, and __post_init__ has run once already.
    value: object = object.__new__(kind)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(value, name, part)
    return value


def hole_paths(structure: Structure, path: str = "") -> list[str]:
    """Return the path of every tensor and of every number that is an input, in order."""
    return [leaf_path for leaf_path, leaf in leaf_paths(structure, path) if leaf[0] != _VALUE]


def leaf_paths(structure: Structure, path: str = "") -> Iterator[tuple[str, Structure]]:
    """Yield path and structure of every leaf, in order."""
    if structure[0] in _LEAF_TAGS:
        yield path, structure
    else:
        for name, child in zip(_child_names(structure), _children(structure), strict=True):
            yield from leaf_paths(child, f"{path}{name}")


def map_leaves(structure: Structure, change: Callable[[Structure], Structure]) -> Structure:
    """Return the structure with every leaf replaced by what ``change`` makes of it, in order."""
    if structure[0] in _LEAF_TAGS:
        return change(structure)
    children = tuple(map_leaves(child, change) for child in _children(structure))
    return (*structure[:-1], children)


def _children(structure: Structure) -> tuple[Structure, ...]:
    children: tuple[Structure, ...] = structure[-1]
    return children


def _child_names(structure: Structure) -> list[str]:
    tag, children = structure[0], _children(structure)
    if tag == "dict":
        return [f"[{key!r}]" for _, key in structure[1]]
    if tag == _DATACLASS:
        return [f".{name}" for name in structure[2]]
    if tag == _NODE:
        node = _node_def(structure[1])
        assert node is not None, "a structure is made from registered containers only"  # noqa: S101
        # Stand-ins are tensors, since some containers drop what is None.
        rebuilt = unflatten(structure, itertools.repeat(torch.empty(0)))
        return _child_paths(node, rebuilt, len(children), "")
    return [f"[{position}]" for position in range(len(children))]

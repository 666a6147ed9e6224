"""Structures as JSON, so that a checkpoint can hold them without pickle.

Types are stored by the name they were registered under with torch's pytree and are looked up in
that registry on reading; nothing is imported by name, so reading a structure runs no code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from aitune_core._trees import HOLE, SCALAR_HOLE, Context, Omitted, Structure, TreeError

__all__ = ["structure_from_json", "structure_to_json"]

_TORCH_VALUES: Final = (torch.dtype, torch.layout, torch.memory_format)
_KEY_TYPES: Final[Mapping[str, type]] = {"str": str, "int": int, "bool": bool}
_SCALARS: Final[Mapping[str, type]] = {"int": int, "float": float}
_RETURN_TYPES: Final = "torch.return_types."
_REGISTER: Final = (
    "register it with a serialized_type_name, through torch.export.register_dataclass or "
    "torch.utils._pytree.register_pytree_node, before tuning"
)


def structure_to_json(structure: Structure, path: str = "") -> Any:  # noqa: ANN401
    """Return ``structure`` as JSON-able data.

    Raises:
        TreeError: A container or value has no form that can be restored.
    """
    tag = structure[0]
    if tag == "*":
        return "*"
    if tag == SCALAR_HOLE:
        return {"scalar": structure[1].__name__}
    if tag == "=":
        return {"value": _value_to_json(structure[1], structure[2], path)}
    children = [structure_to_json(child, path) for child in structure[-1]]
    if tag in ("tuple", "list"):
        return {tag: children}
    if tag == "dict":
        keys = [[kind.__name__, key] for kind, key in structure[1]]
        return {"dict": children, "keys": keys}
    kind = structure[1]
    name = _registered_name(kind)
    if tag == "dataclass" or name is None:
        reason = f"{kind.__module__}.{kind.__qualname__} has no registered name; {_REGISTER}"
        raise TreeError(reason, path)
    return {
        "type": name,
        "context": _context_to_json(kind, structure[2].value, path),
        "children": children,
    }


def structure_from_json(data: object) -> Structure:
    """Return the structure that `structure_to_json` made ``data`` from.

    Raises:
        TreeError: The data is malformed, or names a type that is not registered here.
    """
    if data == "*":
        return HOLE
    if not isinstance(data, dict):
        reason = f"a structure must be '*' or an object, got {data!r:.80}"
        raise TreeError(reason)
    if "value" in data:
        return _value_from_json(data["value"])
    if "scalar" in data:
        if not isinstance(data["scalar"], str) or data["scalar"] not in _SCALARS:
            reason = f"the kind of a number must be int or float, got {data['scalar']!r:.80}"
            raise TreeError(reason)
        return (SCALAR_HOLE, _SCALARS[data["scalar"]])
    for tag in ("tuple", "list"):
        if tag in data:
            return (tag, _children_from_json(data[tag]))
    if "dict" in data:
        return _dict_from_json(data)
    kind, context = _registered_type(data.get("type"), data.get("context"))
    return (
        "node",
        kind,
        Context(context, repr(context)),
        _children_from_json(data.get("children")),
    )


def _children_from_json(data: object) -> tuple[Structure, ...]:
    if not isinstance(data, list):
        reason = f"children of a structure must be a list, got {data!r:.80}"
        raise TreeError(reason)
    return tuple(structure_from_json(child) for child in data)


def _dict_from_json(data: dict[str, Any]) -> Structure:
    children, keys = _children_from_json(data["dict"]), data.get("keys")
    if not isinstance(keys, list) or len(keys) != len(children):
        reason = "a dict structure needs one key per child"
        raise TreeError(reason)
    pairs = []
    for pair in keys:
        kind = _KEY_TYPES.get(pair[0]) if isinstance(pair, list) and len(pair) == 2 else None  # noqa: PLR2004
        if kind is None or type(pair[1]) is not kind:
            reason = f"a dict key must be a [type, value] pair, got {pair!r:.80}"
            raise TreeError(reason)
        pairs.append((kind, pair[1]))
    return ("dict", tuple(pairs), children)


def _value_to_json(kind: type, value: object, path: str) -> Any:  # noqa: ANN401
    if kind in (type(None), bool, int, str):
        return value
    if value is Omitted.OMITTED:
        return {"omitted": True}
    if isinstance(value, Context):
        value = value.value
    if kind is float:
        return {"float": float.hex(value)}  # type: ignore[arg-type]
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}  # type: ignore[attr-defined]
    if kind is torch.device:
        return {"device": str(value)}
    if kind in _TORCH_VALUES:
        return {"torch": str(value).removeprefix("torch.")}
    reason = (
        f"a value of type {kind.__module__}.{kind.__qualname__} cannot be stored; pass a str, "
        "number or tensor instead"
    )
    raise TreeError(reason, path)


def _value_from_json(data: object) -> Structure:
    if data is None or isinstance(data, bool | int | str):
        return ("=", type(data), data)
    try:
        value = _stored_value(data)
    except (TypeError, ValueError, KeyError, RuntimeError, OverflowError) as error:
        reason = f"cannot read the stored value {data!r:.80}"
        raise TreeError(reason) from error
    if isinstance(value, float):
        return ("=", float, Context(value, value.hex()))
    if isinstance(value, complex):
        return ("=", complex, Context(value, repr(value)))
    return ("=", type(value), value)


def _stored_value(data: Any) -> object:  # noqa: ANN401
    ((tag, value),) = data.items() if isinstance(data, dict) else (("", data),)
    if tag == "omitted":
        return Omitted.OMITTED
    if tag == "float":
        return float.fromhex(value)
    if tag == "complex":
        real, imaginary = value
        return complex(float.fromhex(real), float.fromhex(imaginary))
    if tag == "device":
        return torch.device(value)
    found = getattr(torch, value, None) if tag == "torch" and isinstance(value, str) else None
    if not isinstance(found, _TORCH_VALUES):
        msg = f"unknown kind of value {tag!r}"
        raise ValueError(msg)  # noqa: TRY004
    return found


def _registered_name(kind: type) -> str | None:
    if getattr(torch.return_types, kind.__name__, None) is kind:
        return f"{_RETURN_TYPES}{kind.__name__}"
    entry = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    if entry is None or entry.serialized_type_name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
        return None
    return str(entry.serialized_type_name)


def _context_to_json(kind: type, context: object, path: str) -> Any:  # noqa: ANN401
    if pytree.is_namedtuple_class(kind) or kind.__module__ == torch.return_types.__name__:
        return None
    entry = pytree.SUPPORTED_SERIALIZED_TYPES[kind]
    if entry.to_dumpable_context is not None:
        if _imports_by_name(entry):
            reason = (
                f"{kind.__qualname__} cannot be restored without importing code by name; return a "
                "dict or list instead"
            )
            raise TreeError(reason, path)
        return entry.to_dumpable_context(context)
    if not _is_json(context):
        reason = f"the pytree context of {kind.__qualname__} is not JSON; {_REGISTER}"
        raise TreeError(reason, path)
    return context


def _is_json(value: object) -> bool:
    if isinstance(value, list):
        return all(_is_json(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str)


def _registered_type(name: object, context: object) -> tuple[type, object]:
    if not isinstance(name, str):
        reason = f"the type of a structure must be a name, got {name!r:.80}"
        raise TreeError(reason)
    if name.startswith(_RETURN_TYPES):
        kind = getattr(torch.return_types, name.removeprefix(_RETURN_TYPES), None)
        if isinstance(kind, type) and kind in pytree.SUPPORTED_NODES:
            return kind, None
    found = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)
    if found is None:
        reason = (
            f"the type {name!r} is not registered with torch's pytree here; import what registers "
            f"it before loading: import {name.rpartition('.')[0] or name}"
        )
        raise TreeError(reason)
    if pytree.is_namedtuple_class(found):
        return found, found
    entry = pytree.SUPPORTED_SERIALIZED_TYPES[found]
    if entry.from_dumpable_context is None:
        return found, context
    if _imports_by_name(entry):
        reason = f"the type {name!r} cannot be restored without importing code by name"
        raise TreeError(reason)
    return found, entry.from_dumpable_context(context)


def _imports_by_name(entry: Any) -> bool:  # noqa: ANN401
    """Torch's own (de)serialisers of defaultdict and namedtuple import what the text names."""
    return getattr(entry.to_dumpable_context, "__module__", None) == pytree.__name__

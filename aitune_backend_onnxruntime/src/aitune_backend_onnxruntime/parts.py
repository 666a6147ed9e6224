"""Which part of the module a node of an exported model comes from."""

from __future__ import annotations

import ast
import itertools
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    import onnx

__all__ = ["THE_MODULE", "UNKNOWN", "keep_part", "parts_of"]

#: Where the module's own ``forward`` is meant, not that of a part.
THE_MODULE: Final = "the module itself"
UNKNOWN: Final = "unknown"

#: Written into nodes; nothing else that the exporters note about the module is kept.
_KEY: Final = "aitune.part"
#: List of the dynamo exporter: parts from the outermost to the innermost, then the operator.
_SCOPES: Final = "pkg.torch.onnx.name_scopes"
#: The module lies in a wrapper of flat tensors, which may lie in others.
_WRAPPED: Final = "module"


def keep_part(node: onnx.NodeProto) -> None:
    """Replace what an exporter noted about a node by the name of its part."""
    noted = {entry.key: entry.value for entry in node.metadata_props}
    part = _part(node.name, noted)
    del node.metadata_props[:]
    if part is not None:
        node.metadata_props.add(key=_KEY, value=part)


def parts_of(nodes: Iterable[onnx.NodeProto]) -> dict[str, str]:
    """Return parts by the names of nodes and of what they compute.

    Parts are named as in ``named_modules()``; the module's own name is empty.
    """
    parts: dict[str, str] = {}
    for node in nodes:
        for entry in node.metadata_props:
            if entry.key == _KEY:
                parts.update(dict.fromkeys((node.name, *node.output), entry.value))
    return parts


def _part(name: str, noted: dict[str, str]) -> str | None:
    if _SCOPES in noted:
        path = ast.literal_eval(noted[_SCOPES])[-2:-1]
        return _unwrapped((path or [""])[0].split("."))
    # The tracer writes parts into names: /module/module/layers.0/layers.0.1/Relu.
    start, *path = name.split("/")
    if start or not path:
        return None
    names: list[str] = []
    for one in path[:-1]:
        if names and one.startswith(f"{names[-1]}."):
            names.pop()
        names.append(one)
    return _unwrapped(names)


def _unwrapped(names: list[str]) -> str:
    """Leave out the wrappers around the module, each of which holds it under one name."""
    return ".".join(itertools.dropwhile(_WRAPPED.__eq__, names))

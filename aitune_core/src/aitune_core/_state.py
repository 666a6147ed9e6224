"""State of a module: tensors that it holds, wherever they are, and what a call did to them."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Final

from torch import Tensor, nn

from aitune_core._tensors import same_bits, version_of

__all__ = ["StateWatch"]

#: How deep tensors are looked for in attributes, and how many objects are looked at.
_MAX_DEPTH: Final = 6
_MAX_OBJECTS: Final = 20_000
#: Python's own parts, which hold no state of a module.
_OPAQUE: Final = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
)


class StateWatch:
    """Notices that a call changed tensors that a module holds.

    Parameters and buffers are looked at, and tensors in plain attributes, also in lists, dicts and
    objects there.

    Args:
        module: The module, before the call.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # The tensors themselves, not their ids: those of dead ones are given out again.
        self._before = {path: (held, version_of(held)) for path, held in _tensors(module)}

    def written(self) -> str | None:
        """Return the path of a tensor that was written to since; None where there is none."""
        for path, (tensor, version) in self._before.items():
            if version_of(tensor) != version:
                return path
        return None

    def replaced(self, *, by_equal: bool = False) -> str | None:
        """Return the path of a tensor that was added, taken away or replaced since, if any.

        Args:
            by_equal: Whether being replaced by an equal tensor counts.
        """
        after = dict(_tensors(self._module))
        for path in (*after, *self._before):
            new, (old, _) = after.get(path), self._before.get(path, (None, 0))
            if new is old:
                continue
            if by_equal or new is None or old is None or not _equal(new, old):
                return path
        return None


def _equal(one: Tensor, other: Tensor) -> bool:
    same = (one.dtype, one.device, one.layout) == (other.dtype, other.device, other.layout)
    return same and same_bits(one, other)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield path and tensor of all that a module holds, in order."""
    seen: set[int] = set()
    stack: list[tuple[str, object, int]] = [("", module, 0)]
    while stack and len(seen) < _MAX_OBJECTS:
        path, value, depth = stack.pop()
        if isinstance(value, Tensor):
            yield path, value
            continue
        if isinstance(value, _OPAQUE) or id(value) in seen or depth > _MAX_DEPTH:
            continue
        seen.add(id(value))
        stack.extend(reversed([*_parts(path, value, depth)]))


def _parts(path: str, value: object, depth: int) -> Iterator[tuple[str, object, int]]:
    prefix = f"{path}." if path else ""
    if isinstance(value, nn.Module):
        # Parts of modules are no deeper: models nest at will.
        for held in (value._parameters, value._buffers, value._modules):  # noqa: SLF001
            yield from ((f"{prefix}{name}", part, 0) for name, part in held.items())
        own = {"_parameters", "_buffers", "_modules"}
        yield from (
            (f"{prefix}{name}", part, depth + 1)
            for name, part in vars(value).items()
            if name not in own
        )
    elif isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", part, depth + 1) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{path}[{place}]", part, depth + 1) for place, part in enumerate(value))
    elif hasattr(value, "__dict__"):
        yield from ((f"{prefix}{name}", part, depth + 1) for name, part in vars(value).items())

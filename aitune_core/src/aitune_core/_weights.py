"""Weights of a module: whether they are still those that an engine was built from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import attrs
from torch import Tensor, nn

from aitune_core._tensors import version_of

__all__ = ["WeightWatch"]

#: Entries looked at in full per call: about 100 ns each, against 30 ns for a version.
_PER_CALL: Final = 8


@attrs.frozen
class _Entry:
    """A parameter, buffer or submodule where it was when the watch began."""

    owner: Mapping[str, object]
    name: str
    value: object
    address: int
    version: int

    def unchanged(self) -> bool:
        value = self.value
        if self.owner.get(self.name) is not value:
            return False
        return not isinstance(value, Tensor) or (
            value.data_ptr() == self.address and version_of(value) == self.version
        )


def _entries(module: nn.Module) -> Iterator[_Entry]:
    for part in module.modules():
        for owner in (part._parameters, part._buffers, part._modules):  # noqa: SLF001
            for name, value in owner.items():
                if isinstance(value, Tensor):
                    yield _Entry(owner, name, value, value.data_ptr(), version_of(value))
                else:
                    yield _Entry(owner, name, value, 0, 0)


class WeightWatch:
    """Notices that parameters, buffers or parts of a module were changed, moved or replaced.

    Tensors that were written to are noticed at once, by their version. Tensors and parts that were
    replaced or moved are looked for in turn, a few at each look: a change of the whole module is
    noticed at once, that of one place in a large module after some calls.

    Args:
        module: The module to watch, from now on.
    """

    def __init__(self, module: nn.Module) -> None:
        self._entries = tuple(_entries(module))
        tensors = [entry.value for entry in self._entries if isinstance(entry.value, Tensor)]
        self._written = tuple(tensor for tensor in tensors if not tensor.is_inference())
        self._versions = [tensor._version for tensor in self._written]  # noqa: SLF001
        self._next = 0

    def unchanged(self) -> bool:
        """Look at the version of every tensor, and at the next few entries in full."""
        entries, start = self._entries, self._next
        if len(entries) > _PER_CALL:
            self._next = start + _PER_CALL if start + _PER_CALL < len(entries) else 0
            entries = entries[start : start + _PER_CALL]
        versions = [tensor._version for tensor in self._written]  # noqa: SLF001
        return versions == self._versions and all(entry.unchanged() for entry in entries)

    def fake(self) -> bool:
        """Whether the module's tensors are stand-ins for now, which an exporter put in place."""
        return any(
            type(entry.owner.get(entry.name)).__module__.startswith("torch._subclasses")
            for entry in self._entries
        )

    def all_unchanged(self) -> bool:
        """Look at every entry."""
        return all(entry.unchanged() for entry in self._entries)

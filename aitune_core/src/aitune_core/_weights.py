"""Weights of a module: whether they are still those that an engine was built from."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Protocol, TypeAlias

import attrs
from torch import Tensor, nn

from aitune_core._tensors import version_of

__all__ = ["WeightWatch"]

#: Entries looked at in full per call: about 100 ns each, against 30 ns for a version and for
#: the identity of an entry.
_PER_CALL: Final = 8
#: Comes after all entries, so that one more or one fewer shows as a difference in a place.
_END: Final = object()


class _Items(Protocol):
    """What TorchScript has in place of a dict."""

    def items(self) -> Iterable[tuple[str, object]]: ...


@attrs.frozen
class _Scripted:
    """The parameters, buffers or parts of a TorchScript module, read anew at each look."""

    source: _Items

    def get(self, name: str) -> object:
        return dict(self.source.items()).get(name)

    def items(self) -> Iterable[tuple[str, object]]:
        return self.source.items()

    def __iter__(self) -> Iterator[object]:
        return iter([value for _, value in self.source.items()])

    def __len__(self) -> int:
        return len(list(self.source.items()))


_Owner: TypeAlias = Mapping[str, object] | _Scripted


@attrs.frozen
class _Entry:
    """A parameter, buffer or submodule where it was when the watch began."""

    owner: _Owner
    name: str
    value: object
    address: int
    version: int

    @classmethod
    def of(cls, owner: _Owner, name: str, value: object) -> _Entry:
        if isinstance(value, Tensor):
            return cls(owner, name, value, _address(value), version_of(value))
        return cls(owner, name, value, 0, 0)

    def unchanged(self) -> bool:
        value = self.value
        if self.owner.get(self.name) is not value:
            return False
        return not isinstance(value, Tensor) or (
            _address(value) == self.address and version_of(value) == self.version
        )


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a sparse tensor, which has no one storage
        return 0


def _owners(module: nn.Module) -> Iterator[_Owner]:
    for part in module.modules():
        owners: tuple[Any, ...] = (part._parameters, part._buffers, part._modules)  # noqa: SLF001
        for owner in owners:
            yield owner if isinstance(owner, dict) else _Scripted(owner)


class WeightWatch:
    """Notices that parameters, buffers or parts of a module were changed, moved or replaced.

    Its class counts, too: parametrizations, for one, change it.

    At each look, every tensor is asked for its count of writes, and every place for what is in it,
    so that tensors which were written to, replaced, added or taken away are noticed at once.
    Whether a tensor was given other memory (`Tensor.data` was set) is asked of a few tensors at
    each look, in turn: for the whole module it is noticed at once, for one tensor of a large
    module after some calls.

    Tensors that were made under `torch.inference_mode` have no count of writes: where one is
    written to in place, nobody notices.

    Args:
        module: The module to watch, from now on.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._class = module, type(module)
        owners = tuple(_owners(module))
        full = [owner for owner in owners if owner]
        #: Places that were empty; something in one of them is a change.
        self._empty = [owner for owner in owners if not owner]
        self._entries = tuple(
            _Entry.of(owner, name, value) for owner in full for name, value in owner.items()
        )
        # Views follow their dicts, and need not be made again at each look.
        self._places: list[Iterable[object]] = [
            owner if isinstance(owner, _Scripted) else owner.values() for owner in full
        ]
        self._places.append((_END,))
        self._values = [*(entry.value for entry in self._entries), _END]
        tensors = [entry.value for entry in self._entries if isinstance(entry.value, Tensor)]
        self._written = tuple(tensor for tensor in tensors if not tensor.is_inference())
        self._versions = [tensor._version for tensor in self._written]  # noqa: SLF001
        self._next = 0

    def unchanged(self) -> bool:
        """Look at every place and at every version, and at the next few entries in full."""
        entries, start = self._entries, self._next
        if len(entries) > _PER_CALL:
            self._next = start + _PER_CALL if start + _PER_CALL < len(entries) else 0
            entries = entries[start : start + _PER_CALL]
        versions = [tensor._version for tensor in self._written]  # noqa: SLF001
        return (
            versions == self._versions
            and self._in_place()
            and all(entry.unchanged() for entry in entries)
        )

    def _in_place(self) -> bool:
        """Whether every place holds what it held; Python code runs once, not once per place."""
        if type(self._module) is not self._class:
            return False
        found = itertools.chain.from_iterable(self._places)
        try:
            return all(map(operator.is_, found, self._values)) and not any(self._empty)
        except RuntimeError:  # another thread adds an entry this moment
            return False

    def fake(self) -> bool:
        """Whether the module's tensors are stand-ins for now, which an exporter put in place."""
        return any(
            type(entry.owner.get(entry.name)).__module__.startswith("torch._subclasses")
            for entry in self._entries
        )

    def all_unchanged(self) -> bool:
        """Look at every entry in full."""
        return self._in_place() and all(entry.unchanged() for entry in self._entries)

"""Modules and tensors by content: hashes of weights, attributes and code."""

from __future__ import annotations

import ctypes
import enum
import hashlib
import inspect
import json
import operator
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from aitune_core._distributions import versions_of
from aitune_core._spec_json import graph_to_json
from aitune_core._tensors import plain_tensor, version_of
from aitune_core.specs import GraphSpec

__all__ = ["ContentHash", "TensorHashes", "UnknownContentError"]

_PIECE_BYTES: Final = 16 * 1024 * 1024
#: Objects looked at; more than this is no module's settings but a data set that hangs on it.
_MAX_OBJECTS: Final = 1_000_000
#: Known by versions that every key has, as Python's own modules are.
_BASE: Final = frozenset({"aitune_core", "builtins", "torch"})
_PYTHON: Final = ("stdlib", "platstdlib")
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
#: What every module has, apart from what is looked at by itself.
_PLUMBING: Final = frozenset({*vars(nn.Module()), "_compiled_call_impl"}) - {"training"}
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks")
_HOOK_KINDS: Final = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_CODE: Final = operator.attrgetter(
    "co_name",
    "co_argcount",
    "co_posonlyargcount",
    "co_kwonlyargcount",
    "co_flags",
    "co_names",
    "co_varnames",
    "co_freevars",
    "co_cellvars",
    "co_code",
    "co_exceptiontable",
)
#: Entries of a class that say nothing about what it does; attrs puts a number into ``__hash__``
#: that differs between processes.
_OF_CLASSES: Final = frozenset(
    {
        "__abstractmethods__",
        "__annotate_func__",
        "__annotations__",
        "__annotations_cache__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__hash__",
        "__module__",
        "__parameters__",
        "__qualname__",
        "__static_attributes__",
        "__weakref__",
        "_abc_impl",
    }
)
_SETTINGS: Final = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_NAMED: Final = (
    types.ModuleType,
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
)


class _Origin(enum.Enum):
    """Where code comes from, and so how it is known: by versions, or by itself."""

    BASE = "Python, torch or this package"
    LIBRARY = "an installed library"
    OWN = "the user"


class UnknownContentError(Exception):
    """Something has no content that can be told, or too much of it."""


class TensorHashes:
    """Hashes of tensors, each computed once as long as nobody writes to it."""

    def __init__(self) -> None:
        # With the tensors themselves: ids of dead ones are given out again.
        self._known: dict[int, tuple[Tensor, int, int, bytes]] = {}

    def of(self, tensor: Tensor) -> bytes:
        """Return the SHA-256 of a tensor's elements, in an order that its strides give.

        Nothing is copied on the CPU where memory has no gaps; else, and on CUDA, small pieces.
        """
        state = (tensor.data_ptr(), version_of(tensor))
        known = self._known.get(id(tensor))
        if known is not None and known[0] is tensor and known[1:3] == state:
            return known[3]
        digest = hashlib.sha256()
        for piece in _pieces(_in_memory_order(tensor.detach())):
            on_cpu = piece.resolve_conj().resolve_neg().contiguous().cpu()
            # Not through NumPy, which torch does not bring along.
            content = (ctypes.c_ubyte * on_cpu.nbytes).from_address(on_cpu.data_ptr())
            digest.update(content)
        if not tensor.is_inference():  # those have no count of writes
            self._known[id(tensor)] = (tensor, *state, digest.digest())
        return digest.digest()


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Return a view whose last axis moves fastest through memory: transposed weights are many."""
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda axis: -strides[axis]))


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor in pieces, in order."""
    if tensor.numel() == 0:
        return
    if tensor.nbytes <= _PIECE_BYTES:
        yield tensor
    elif tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), max(1, _PIECE_BYTES // tensor.itemsize))
    else:
        rows = max(1, _PIECE_BYTES * len(tensor) // tensor.nbytes)
        for part in torch.split(tensor, rows):
            yield from _pieces(part[0] if len(part) == 1 else part)


class ContentHash:
    """Hash of values: numbers, containers, tensors, modules with their code, plain objects.

    Two values have one hash where they have the same content, in any process. Code counts as
    what Python compiled, so that comments and places do not count, and files that were edited
    after their import do not either. Code of installed libraries counts by version.

    Args:
        tensors: Hashes of tensors that are known.
    """

    def __init__(self, tensors: TensorHashes) -> None:
        self._tensors = tensors
        self._digest = hashlib.sha256()
        #: Places of objects that were met, which are kept: ids of dead ones are given out again.
        self._met: dict[int, tuple[int, object]] = {}
        self._origins: dict[str, _Origin] = {}
        self._count = 0
        #: The first that fits counts.
        self._by_kind: tuple[tuple[Any, Callable[[Any], None]], ...] = (
            (Tensor, self._add_tensor),
            (nn.Module, self._add_module),
            (GraphSpec, self._add_graph),
            (torch.fx.Graph, self._add_code_of_fx),
            (type, self._add_class),
            (types.FunctionType, self._add_function),
            (types.CodeType, self._add_code),
            (_NAMED, self._add_name),
            (types.MethodType, self._add_method),
            ((staticmethod, classmethod), self._add_wrapped),
            (property, self._add_property),
            (dict, self._add_dict),
            ((list, tuple), self._add_sequence),
            ((set, frozenset), self._add_set),
        )

    def add(self, label: str, value: object) -> None:
        """Add a value under a name.

        Raises:
            UnknownContentError: It holds tensors whose elements cannot be read, or too much.
        """
        self._put("label", label)
        try:
            self._add(value)
        except RecursionError as error:
            msg = f"{label} is nested too deeply"
            raise UnknownContentError(msg) from error

    def hexdigest(self) -> str:
        """Return the hash of all that was added, with the versions of libraries in it."""
        digest = self._digest.copy()
        packages = sorted(
            name for name, origin in self._origins.items() if origin is _Origin.LIBRARY
        )
        digest.update(json.dumps([(name, versions_of(name)) for name in packages]).encode())
        return digest.hexdigest()

    def _put(self, kind: str, content: str | bytes = b"") -> None:
        data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        self._digest.update(f"{kind} {len(data)}\n".encode())
        self._digest.update(data)

    def _add(self, value: object) -> None:
        self._count += 1
        if self._count > _MAX_OBJECTS:
            msg = f"more than {_MAX_OBJECTS} objects hang on the module"
            raise UnknownContentError(msg)
        kind = type(value)
        if value is None or kind in (bool, int, float, complex):
            self._put(kind.__name__, repr(value))
        elif isinstance(value, str | bytes | bytearray) and kind in (str, bytes, bytearray):
            self._put(kind.__name__, value if isinstance(value, str) else bytes(value))
        elif isinstance(value, _SETTINGS):
            self._put("torch", repr(value))
        elif isinstance(value, enum.Enum):
            self._put("enum", f"{kind.__module__}.{kind.__qualname__}.{value.name}")
        elif isinstance(value, tuple | frozenset | types.CodeType):
            # Whether equal constants are one object is up to the compiler.
            self._add_new(value)
        elif (met := self._met.get(id(value))) is not None:
            self._put("again", str(met[0]))
        else:
            self._met[id(value)] = (len(self._met), value)
            self._add_new(value)

    def _add_new(self, value: object) -> None:
        for kinds, add in self._by_kind:
            if isinstance(value, kinds):
                add(value)
                return
        self._add_object(value)

    def _add_graph(self, graph: GraphSpec) -> None:
        self._put("graph", json.dumps(graph_to_json(graph), sort_keys=True))

    def _add_code_of_fx(self, graph: torch.fx.Graph) -> None:
        self._put("fx", graph.python_code("self").src)

    def _add_code(self, code: types.CodeType) -> None:
        self._add_all("code", (*_CODE(code), *code.co_consts))

    def _add_name(self, value: Any) -> None:  # noqa: ANN401
        self._put("named", getattr(value, "__qualname__", value.__name__))

    def _add_method(self, method: types.MethodType) -> None:
        self._add_all("method", (method.__func__, method.__self__))

    def _add_wrapped(
        self, method: staticmethod[..., object] | classmethod[Any, ..., object]
    ) -> None:
        self._add_all(type(method).__name__, (method.__func__,))

    def _add_property(self, value: property) -> None:
        self._add_all("property", (value.fget, value.fset))

    def _add_dict(self, items: dict[object, object]) -> None:
        self._name_type(items)
        self._add_all("dict", _flat(items))

    def _add_sequence(self, values: list[object] | tuple[object, ...]) -> None:
        self._name_type(values)
        self._add_all("sequence", values)

    def _add_all(self, kind: str, values: Iterable[object]) -> None:
        values = tuple(values)
        self._put(kind, str(len(values)))
        for value in values:
            self._add(value)

    def _name_type(self, value: object) -> None:
        kind = type(value)
        self._put("type", f"{kind.__module__}.{kind.__qualname__}")

    def _add_set(self, values: set[object] | frozenset[object]) -> None:
        """Add elements whose order differs between processes."""
        hashes = []
        for value in values:
            one = ContentHash(self._tensors)
            one.add("element", value)
            hashes.append(one.hexdigest())
        self._add_all("set", sorted(hashes))

    def _add_tensor(self, tensor: Tensor) -> None:
        on_meta = tensor.device.type == "meta"
        if not on_meta and not plain_tensor(tensor):
            msg = f"a {type(tensor).__name__} of layout {tensor.layout} has no plain elements"
            raise UnknownContentError(msg)
        facts = (tensor.dtype, tensor.device.type, tuple(tensor.shape), tensor.stride())
        self._put("tensor", repr((type(tensor).__name__, *facts, tensor.requires_grad)))
        if not on_meta:
            self._put("elements", self._tensors.of(tensor))

    def _add_module(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            msg = "the code of TorchScript modules is not looked into"
            raise UnknownContentError(msg)
        self._add(type(module))
        own = vars(module)
        self._add_all("parameters", _flat(module._parameters))  # noqa: SLF001
        self._add_all("buffers", _flat(module._buffers))  # noqa: SLF001
        self._add_all("parts", _flat(module._modules))  # noqa: SLF001
        self._add_hooks(own)
        for name, value in own.items():
            if name not in _PLUMBING:
                self._put("attribute", name)
                self._add(value)

    def _add_hooks(self, own: dict[str, Any]) -> None:
        """Add hooks in their order: their keys count up through the life of a process."""
        for name in _HOOKS:
            hooks = own.get(name) or {}
            kinds = [[key in own.get(kind, {}) for kind in _HOOK_KINDS] for key in hooks]
            self._add_all(name, (*hooks.values(), kinds))

    def _add_class(self, kind: type) -> None:
        self._put("class", f"{kind.__module__}.{kind.__qualname__}")
        for base in kind.__mro__:
            self._put("base", f"{base.__module__}.{base.__qualname__}")
            origin = self._origin(base.__module__)
            # What a model computes may be changed in place, in a library, too.
            if origin is _Origin.OWN or (origin is _Origin.LIBRARY and issubclass(kind, nn.Module)):
                self._add_entries(base)

    def _add_entries(self, kind: type) -> None:
        for name in sorted(vars(kind).keys() - _OF_CLASSES):
            self._put("entry", name)
            self._add(vars(kind)[name])

    def _add_function(self, function: types.FunctionType) -> None:
        self._put("function", f"{function.__module__}.{function.__qualname__}")
        if self._origin(function.__module__) is _Origin.BASE:
            return
        self._add(function.__code__)
        self._add_all("defaults", (function.__defaults__, function.__kwdefaults__))
        self._add_all("closure", [_content(cell) for cell in function.__closure__ or ()])
        if self._installed(function.__module__):
            return
        names = _names(function.__code__)
        for name in sorted(names & function.__globals__.keys()):
            self._put("global", name)
            value = function.__globals__[name]
            if isinstance(value, types.ModuleType) and not self._installed(value.__name__):
                for attribute in sorted(names & vars(value).keys()):
                    self._put("global", attribute)
                    self._add_global(vars(value)[attribute])
            else:
                self._add_global(value)

    def _add_global(self, value: object) -> None:
        """Add what code refers to by name; of a library only the name."""
        named = isinstance(value, type | types.FunctionType)
        if named and self._installed(value.__module__ or ""):
            self._put("named", f"{value.__module__}.{value.__qualname__}")  # type: ignore[attr-defined]
        else:
            self._add(value)

    def _installed(self, module: str | None) -> bool:
        return self._origin(module) is not _Origin.OWN

    def _origin(self, module: str | None) -> _Origin:
        top = (module or "").partition(".")[0]
        if top not in self._origins:
            self._origins[top] = _origin(top)
        return self._origins[top]

    def _add_object(self, value: object) -> None:
        """Add an object by what pickle would store of it; by its type where there is no such."""
        self._add(type(value))
        try:
            state: Any = value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001 - whatever an object's own code raises
            state = getattr(value, "__dict__", None)
        if isinstance(state, tuple):
            # Lists and dicts give their items as iterators.
            state = [list(part) if isinstance(part, Iterator) else part for part in state]
        # Such as the function behind functools.lru_cache, which is stored by name.
        wrapped = getattr(value, "__dict__", {}).get("__wrapped__")
        self._add_all("state", (state, wrapped))


def _origin(package: str) -> _Origin:
    """Where a top-level package came from, by its place: names of Python's own may be anyone's."""
    if package in _BASE:
        return _Origin.BASE
    file = getattr(sys.modules.get(package), "__file__", None)
    # Where a library runs the program, as in a notebook, its main module holds the user's code.
    if package == "__main__" or (file is None and package not in sys.stdlib_module_names):
        return _Origin.OWN
    if file is None or not _INSTALLED.isdisjoint(Path(file).parts):
        return _Origin.BASE if file is None else _Origin.LIBRARY
    inside = any(Path(file).is_relative_to(sysconfig.get_path(kind)) for kind in _PYTHON)
    return _Origin.BASE if inside else _Origin.OWN


def _flat(items: Mapping[Any, object]) -> list[object]:
    return [part for item in tuple(items.items()) for part in item]


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return inspect.Parameter.empty


def _names(code: types.CodeType) -> set[str]:
    """Names that code and the code in it refer to."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))

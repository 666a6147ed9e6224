"""Running eager code in a wider floating-point type than the one that it asks for."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from aitune_core._tensors import computable

__all__ = ["NotFollowedError", "Widening", "own_type", "sharing_copy", "wider_type"]

_Widths: TypeAlias = Mapping[torch.dtype, torch.dtype]

_WIDTHS: Final[Mapping[torch.dtype, _Widths]] = {
    torch.float64: {
        torch.float16: torch.float64,
        torch.bfloat16: torch.float64,
        torch.float32: torch.float64,
        torch.complex32: torch.complex128,
        torch.complex64: torch.complex128,
    },
    torch.float32: {
        torch.float16: torch.float32,
        torch.bfloat16: torch.float32,
        torch.complex32: torch.complex64,
    },
}
_WIDER: Final = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
}
#: Operators that only pick values of their first argument: it is not widened whole for them.
_PICKING: Final = frozenset({"embedding", "gather", "index", "index_select", "take"})
#: For how much memory wide copies of weights are kept.
_MAX_KEPT_BYTES: Final = 2**30
_WRITING: Final = frozenset(
    {"__setitem__"}
    | {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow")}
)


class NotFollowedError(Exception):
    """The code does something that has no meaning in another type."""


def own_type(module: nn.Module, inputs: Sequence[Tensor]) -> torch.dtype | None:
    """Return the floating-point type of most weights, else of most elements of the inputs."""
    for tensors in ([*module.parameters(), *module.buffers()], inputs):
        counts: dict[torch.dtype, int] = {}
        for tensor in tensors:
            if computable(tensor):
                real = tensor.dtype.to_real()
                counts[real] = counts.get(real, 0) + tensor.numel()
        if counts:
            return max(counts, key=lambda dtype: counts[dtype])
    return None


def wider_type(own: torch.dtype | None) -> torch.dtype | None:
    """Return the type that judges another one; None where there is none.

    That is float64 for float32, and float32 for half precision.
    """
    return None if own is None else _WIDER.get(own)


def sharing_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module that shares its tensors; what cannot be copied raises.

    What its code sets on itself while it runs stays in the copy.

    Raises:
        NotFollowedError: A part is scripted.
    """
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        msg = "a part is scripted"
        raise NotFollowedError(msg)
    with _Sharing():
        shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        return copy.deepcopy(module, {**shared})


class _Sharing(TorchFunctionMode):
    """Deep copies of tensors are the tensors themselves."""

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401 - torch's functions have no type
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func is Tensor.__deepcopy__:
            return args[0]
        return func(*args, **(kwargs or {}))


class Widening:
    """Computes in a wider type, whatever types the code names.

    Tensors that exist before are not changed; what is computed of them is wide. The code is told
    that wide tensors are of its own type, so that it takes the same paths and makes the same keys
    of its caches. Integers and booleans stay.

    Args:
        wide: ``float64`` or ``float32``.
        own: The type that wide tensors are said to have.
        weights: Tensors whose wide copies are kept as long as this object, up to 1 GiB, since each
            run needs them again.
    """

    def __init__(self, wide: torch.dtype, own: torch.dtype, weights: Iterable[Tensor] = ()) -> None:
        widths = _WIDTHS[wide]
        self._said = {wide: own, wide.to_complex(): own.to_complex()}
        self._widen = _Widen(widths, weights)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Compute so inside the block.

        Raises:
            NotFollowedError: The code reads the bits of a number, or writes into a tensor that was
                there before.
        """
        with warnings.catch_warnings():
            # Of the weights of recurrent layers, which are no longer in one piece on CUDA.
            warnings.simplefilter("ignore")
            with _Operators(self._widen), _Functions(self._widen, self._said):
                yield


class _Widen:
    """Returns wide copies of narrow tensors, and everything else as it is."""

    def __init__(self, widths: _Widths, weights: Iterable[Tensor]) -> None:
        self.widths = widths
        self._weights = {id(weight): weight for weight in weights}
        self._kept: dict[int, Tensor] = {}
        self._room = _MAX_KEPT_BYTES

    def __call__(self, leaf: Any) -> Any:  # noqa: ANN401
        if not isinstance(leaf, Tensor) or leaf.dtype not in self.widths:
            return leaf
        if id(leaf) in self._kept:
            return self._kept[id(leaf)]
        wide = leaf.detach().to(self.widths[leaf.dtype])
        if id(leaf) in self._weights and wide.nbytes <= self._room:
            self._room -= wide.nbytes
            self._kept[id(leaf)] = wide
        return wide


class _Functions(TorchFunctionMode):
    """Widens arguments before functions that refuse mixed types look at them."""

    def __init__(self, widen: _Widen, said: Mapping[torch.dtype, torch.dtype]) -> None:
        super().__init__()
        self._widen = widen
        self._widths = widen.widths
        self._said = said

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401 - torch's functions have no type
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__set__" and isinstance(args[0], Tensor) and args[0].dtype in self._widths:
            msg = "an attribute of a tensor is set that was there before"
            raise NotFollowedError(msg)
        if name not in {"__get__", "__set__"} and not _writes(name, kwargs):
            args, kwargs = self._arguments(args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, torch.dtype):
            return self._said.get(result, result)
        if isinstance(result, Tensor) and result.dtype in self._widths:
            # Of numbers, by a function that no operator stands for, such as `torch.from_numpy`.
            made = not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs)))
            return self._widen(result) if made else result
        return result

    def _arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments with types exchanged, and all as wide as one of them is."""
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        wide = set(self._widths.values())
        mixed = any(tensor.dtype in wide for tensor in tensors)
        change = self._widen if mixed else _unchanged
        if not any(isinstance(leaf, torch.dtype) for leaf in leaves) and not mixed:
            return args, kwargs
        return tree_map(self._exchanged(change), (args, kwargs))  # type: ignore[no-any-return]

    def _exchanged(self, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def exchange(leaf: Any) -> Any:  # noqa: ANN401
            if isinstance(leaf, torch.dtype):
                return self._widths.get(leaf, leaf)
            return change(leaf)

        return exchange


class _Operators(TorchDispatchMode):
    """Runs each operator on wide arguments."""

    def __init__(self, widen: _Widen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._widen = widen
        self._widths = widen.widths

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's operators have no type
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        self._check(func, name, args, kwargs)
        if name == "lift_fresh" or name in _PICKING:
            # The other arguments are indices.
            return tree_map(self._widen, func(*args, **kwargs))
        if _views(func):
            return func(*args, **kwargs)
        kwargs = {
            key: self._widths.get(value, value) if isinstance(value, torch.dtype) else value
            for key, value in kwargs.items()
        }
        args, kwargs = tree_map(self._widen, (args, kwargs))
        return tree_map(self._widen, func(*args, **kwargs))

    def _check(
        self,
        func: Any,  # noqa: ANN401
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        for place, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - no other way
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and any(
                isinstance(leaf, Tensor) and leaf.dtype in self._widths
                for leaf in tree_leaves(value)
            ):
                msg = f"{name} writes into a tensor that was there before"
                raise NotFollowedError(msg)
        if func is torch.ops.aten.view.dtype and args[0].dtype.is_floating_point:
            msg = "the bits of a floating-point number are read"
            raise NotFollowedError(msg)


def _unchanged(leaf: Any) -> Any:  # noqa: ANN401
    return leaf


def _writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function writes into an argument, which must not be exchanged for a copy."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _WRITING or kwargs.get("out") is not None


def _views(func: Any) -> bool:  # noqa: ANN401
    """Whether an operator only looks at memory otherwise."""
    returns = func._schema.returns  # noqa: SLF001 - no other way
    return bool(returns) and all(
        one.alias_info is not None and not one.alias_info.is_write for one in returns
    )

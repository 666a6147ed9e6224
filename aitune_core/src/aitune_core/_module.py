"""`Module`: a wrapped module that stays the module it wraps."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

import attrs
import torch
from torch import Tensor, nn

from aitune_core._arguments import (
    check_after_tune,
    check_name,
    check_on_miss,
    check_strategy,
)
from aitune_core._devices import check_stays
from aitune_core._graphs import DynamicShapes, check_dynamic_shapes
from aitune_core._serving import ModuleState
from aitune_core.errors import ConfigError
from aitune_core.strategy import Strategy

__all__ = ["Module", "check_wrappable", "state_of"]


def _forward_of(state: ModuleState) -> Callable[..., Any]:
    """Return the ``forward`` of a wrapper, which refers to the state and not to the wrapper."""

    def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return state.call(args, kwargs)

    with_signature: Callable[..., Any] = functools.update_wrapper(forward, state.module.forward)
    return with_signature


class _Forward:
    """The ``forward`` of wrappers: that of the wrapped class for the class, ours for an instance.

    Tracers look it up in the class. Libraries replace it in the instance, to put code around it,
    which must not reach the ``__dict__`` that the wrapper shares.
    """

    def __get__(self, instance: Module | None, owner: type[Module]) -> Callable[..., Any]:
        if instance is not None:
            return instance._aitune_forward  # noqa: SLF001
        forward: Callable[..., Any] = (owner._aitune_wraps or nn.Module).forward  # noqa: SLF001
        return forward

    def __set__(self, instance: Module, value: Callable[..., Any]) -> None:
        object.__setattr__(instance, "_aitune_forward", value)

    def __delete__(self, instance: Module) -> None:
        object.__setattr__(instance, "_aitune_forward", _forward_of(state_of(instance)))


def _combined(cls: type[Any], original: type[nn.Module]) -> type[Any]:
    """Return a class that is both ``cls``, which is `Module` or derives from it, and another."""
    try:
        combined = types.new_class(
            original.__name__,
            (cls, original),
            exec_body=lambda namespace: namespace.update(_aitune_wraps=original),
        )
    except TypeError as error:
        msg = f"Module cannot wrap {original.__qualname__}: {error}; it must not use __slots__"
        raise ConfigError(msg, field="module", value=original, allowed="torch.nn.Module") from error
    combined.__module__, combined.__qualname__ = original.__module__, original.__qualname__
    return combined


def _check_class(state: ModuleState, value: object) -> None:
    original = type(state.module)
    if not isinstance(value, type) or not issubclass(value, nn.Module) or issubclass(value, Module):
        msg = (
            f"__class__ of module {state.name!r} must be {original.__qualname__} or another "
            f"subclass of torch.nn.Module that is not made from the wrapper's type(), got {value!r}"
        )
        raise ConfigError(msg, field="__class__", value=value, allowed="a torch.nn.Module class")


def check_wrappable(module: object) -> None:
    """Check that `Module` can wrap something.

    Raises:
        ConfigError: It is no module, is wrapped already, or is one of TorchScript.
    """
    if not isinstance(module, nn.Module):
        kind = "a class; make an instance" if isinstance(module, type) else type(module).__name__
        msg = f"Module wraps a torch.nn.Module, got {kind}"
        raise ConfigError(msg, field="module", value=module, allowed="torch.nn.Module")
    if isinstance(module, Module):
        msg = f"module is already wrapped, as {state_of(module).name!r}; tune it again instead"
        raise ConfigError(msg, field="module", value=module, allowed="an unwrapped module")
    if isinstance(module, torch.jit.ScriptModule):
        msg = "Module cannot wrap a TorchScript module; wrap the nn.Module it was made from"
        raise ConfigError(msg, field="module", value=module, allowed="torch.nn.Module")


class Module(nn.Module):
    """A PyTorch module with tuned graphs beside its eager code.

    The wrapper shares everything with the module it wraps: attributes, parameters, hooks,
    ``state_dict`` keys, ``isinstance``, methods. A call that fits a tuned graph runs on its
    engine and returns tensors without gradients; every other call runs eagerly or fails, as
    ``on_miss`` says. In training mode, calls are always eager.

    Args:
        module: The module to wrap. It is not copied.
        name: Name for reports and checkpoints; None means the class name.
        strategy: How `tune` chooses; a `Strategy`, or the name of one. None means
            ``"first_wins"`` over all available backends.
        dynamic_shapes: Explicit dims: parameter path of ``forward`` -> axis -> `DynamicDim`.
            Axes that are not named are derived from the recorded calls.
        on_miss: What happens to a call that no tuned graph takes: ``"eager"`` runs it eagerly
            with one warning per reason, ``"error"`` raises `InputMismatchError`.
        after_tune: What happens to the weights after tuning: ``"keep"``; ``"offload"`` moves
            them to the CPU, and back when a call needs eager; ``"release"`` gives their memory up,
            so that a miss is an error.

    Raises:
        ConfigError: An argument cannot be used.
    """

    __slots__ = ("_aitune", "_aitune_forward")

    #: The class of the wrapped module, in classes that `Module` makes.
    _aitune_wraps: ClassVar[type[nn.Module] | None] = None
    _aitune: ModuleState
    _aitune_forward: Callable[..., Any]

    forward = _Forward()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # noqa: ANN401
        """Make an instance of a class that is both `Module` and the class of ``module``."""
        if cls._aitune_wraps is not None:
            # Methods that make another one of their class, as slices of containers are made.
            return cls._aitune_wraps(*args, **kwargs)  # type: ignore[return-value]
        return cls._of(*args, **kwargs)

    @classmethod
    def _of(cls, module: nn.Module, *_args: object, **_kwargs: object) -> Self:
        check_wrappable(module)
        combined = _combined(cls, type(module))
        instance: Self = object.__new__(combined)
        return instance

    def __init__(  # noqa: PLR0913
        self,
        module: nn.Module,
        name: str | None = None,
        *,
        strategy: Strategy | str | None = None,
        dynamic_shapes: DynamicShapes | None = None,
        on_miss: Literal["eager", "error"] = "eager",
        after_tune: Literal["keep", "offload", "release"] = "keep",
    ) -> None:
        """Wrap a module; the arguments are described at the class."""
        # Not super().__init__(): the wrapped module is initialised, and its state is shared.
        check_on_miss(on_miss)
        check_after_tune(after_tune)
        check_name(name)
        if strategy is not None:
            check_strategy(strategy)
        if dynamic_shapes is not None:
            check_dynamic_shapes(dynamic_shapes)
        object.__setattr__(self, "__dict__", module.__dict__)
        state = ModuleState(
            module,
            name or type(module).__name__,
            strategy=strategy,
            dynamic_shapes=dynamic_shapes,
            on_miss=on_miss,
            after_tune=after_tune,
        )
        object.__setattr__(self, "_aitune", state)
        object.__setattr__(self, "_aitune_forward", _forward_of(state))

    @property  # type: ignore[override]
    def __class__(self) -> type[nn.Module]:
        """The class of the wrapped module; ``type()`` gives the class that is `Module`, too."""
        return type(state_of(self).module)

    @__class__.setter
    def __class__(self, value: type[nn.Module]) -> None:
        # Parametrizations, among others, put a class of their own in place.
        state = state_of(self)
        _check_class(state, value)
        combined = _combined(type(self).__bases__[0], value)
        state.change_class(value)
        object.__dict__["__class__"].__set__(self, combined)

    def __deepcopy__(self, memo: dict[int, Any]) -> Module:
        """Copy the module; the copy has weights of its own and is not tuned."""
        state = state_of(self)
        if state.no_eager is not None:
            msg = f"module {state.name!r} cannot be copied: {state.no_eager}; load the file again"
            raise TypeError(msg)
        return _rewrapped(state, copy.deepcopy(state.module, memo))

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Self:  # noqa: ANN401
        """Move or convert the weights; where there are none, engines stay as they are."""
        state = state_of(self)
        if state.no_eager is not None and state.dispatcher is not None:
            check_stays(state.name, state.dispatcher.device, state.dispatcher.dtype, fn)
            return self
        moved: Self = super()._apply(fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        return moved

    def __repr__(self) -> str:
        """Return what the wrapped module says of itself, and how many graphs are tuned."""
        text, dispatcher = super().__repr__(), state_of(self).dispatcher
        if dispatcher is None:
            return text
        count = len(dispatcher.graphs)
        graphs = "1 tuned graph" if count == 1 else f"{count} tuned graphs"
        return f"{text} [{graphs} on {dispatcher.device}]"

    def __copy__(self) -> Module:
        """Copy the module, which shares its weights with the copy."""
        state = state_of(self)
        if state.dispatcher is not None:
            msg = (
                f"module {state.name!r} is tuned, and a shallow copy would share its engines; use "
                "copy.deepcopy for an untuned copy with weights of its own"
            )
            raise TypeError(msg)
        return _rewrapped(state, copy.copy(state.module))

    def __reduce_ex__(self, _protocol: object) -> tuple[Any, ...]:
        """Pickle the wrapped module; engines do not pickle, so a tuned one is refused."""
        state = state_of(self)
        if state.dispatcher is not None:
            msg = (
                f"module {state.name!r} is tuned and its engines cannot be pickled; use "
                "aitune_core.save and aitune_core.load"
            )
            raise TypeError(msg)
        return _rewrapped, (_Options.of(state), state.module)


@attrs.frozen
class _Options:
    """The arguments that `Module` was made with."""

    name: str
    strategy: Strategy | str | None
    dynamic_shapes: DynamicShapes | None
    on_miss: str
    after_tune: str

    @classmethod
    def of(cls, state: ModuleState) -> _Options:
        return cls(*(getattr(state, field.name) for field in attrs.fields(cls)))


def _rewrapped(options: ModuleState | _Options, module: nn.Module) -> Module:
    return Module(
        module,
        options.name,
        strategy=options.strategy,
        dynamic_shapes=options.dynamic_shapes,
        on_miss=options.on_miss,  # type: ignore[arg-type]
        after_tune=options.after_tune,  # type: ignore[arg-type]
    )


def state_of(module: Module) -> ModuleState:
    """Return what aitune knows of a wrapped module."""
    return module._aitune  # noqa: SLF001

"""Serving: a call of a wrapped module runs on a tuned graph, or eagerly."""

from __future__ import annotations

import contextvars
import logging
import re
import threading
import warnings
from collections.abc import Mapping
from typing import Any, Final, NoReturn, Protocol

import torch
from torch import fx, nn
from torch.autograd import forward_ad

from aitune_core._calls import CallForm
from aitune_core._dispatch import Dispatcher, Miss
from aitune_core._graphs import DynamicShapes
from aitune_core._weights import WeightWatch
from aitune_core.errors import InputMismatchError, MissWarning
from aitune_core.strategy import Strategy

__all__ = ["ACTIVE_RECORDER", "ModuleState", "Recorder"]

_log = logging.getLogger(__name__)

_MAX_WARNINGS: Final = 64
_MAX_REASONS: Final = 4096


class Recorder(Protocol):
    """What `tune` puts in place of dispatch while it records."""

    def record(self, state: ModuleState, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Run the call eagerly and note it."""


#: The recorder of the tuning that runs in this context; other threads and tasks have their own.
ACTIVE_RECORDER: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar(
    "aitune_recorder", default=None
)


class ModuleState:
    """What aitune knows of a wrapped module; shared by nothing else."""

    def __init__(  # noqa: PLR0913
        self,
        module: nn.Module,
        name: str,
        *,
        strategy: Strategy | str | None,
        dynamic_shapes: DynamicShapes | None,
        on_miss: str,
        after_tune: str,
    ) -> None:
        self.module = module
        self.name = name
        self.strategy = strategy
        self.dynamic_shapes = dynamic_shapes
        self.on_miss = on_miss
        self.after_tune = after_tune
        self.call_form = CallForm.of(module.forward)
        self.dispatcher: Dispatcher | None = None
        #: Why eager cannot serve a miss; None where it can.
        self.no_eager: str | None = None
        self._watch: WeightWatch | None = None
        self._offloaded_from: torch.device | None = None
        self._warned: set[str] = set()
        #: Reasons that were looked at; the dispatcher gives the same ones again.
        self._warned_reasons: set[InputMismatchError] = set()
        self._lock = threading.Lock()

    def install(self, dispatcher: Dispatcher | None) -> None:
        """Put tuned graphs in place, or take them away; calls under way keep theirs."""
        self._watch = None if dispatcher is None else WeightWatch(self.module)
        self._warned.clear()
        self._warned_reasons.clear()
        self.dispatcher = dispatcher

    def offload(self) -> None:
        """Move the weights to the CPU until eager needs them."""
        self._offloaded_from = self.dispatcher.device if self.dispatcher else None
        self.module.to("cpu")
        self._watch = WeightWatch(self.module)

    def release(self) -> None:
        """Give the memory of the weights up."""
        self.no_eager = (
            "its weights were released after tuning (after_tune='release'); use after_tune='keep' "
            "or 'offload' to have eager at hand"
        )
        self.module.to("meta")
        self._watch = WeightWatch(self.module)

    def change_class(self, value: type[nn.Module]) -> None:
        """Make the wrapped module one of another class; the next call finds tuned graphs stale."""
        self.module.__class__ = value
        self.call_form = CallForm.of(self.module.forward)

    def stale(self) -> bool:
        """Whether the weights are no longer those that the tuned graphs hold."""
        return self._watch is not None and not self._watch.all_unchanged()

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Run a call on a tuned graph, or eagerly."""
        if torch.compiler.is_dynamo_compiling():
            return self.eager(args, kwargs)
        recorder = ACTIVE_RECORDER.get()
        if recorder is not None:
            return recorder.record(self, args, kwargs)
        dispatcher = self.dispatcher
        if dispatcher is None or self.module.training or _transforming(args, kwargs):
            return self.eager(args, kwargs)
        return self._tuned(dispatcher, args, kwargs)

    def _tuned(
        self, dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:  # noqa: ANN401
        """Run a call on the graph that takes it, if its weights are still the module's."""
        try:
            graph, inputs = dispatcher.find(args, kwargs)
        except Miss as miss:
            if self._stale(dispatcher):
                return self.eager(args, kwargs)
            return self._missed(miss.reason, args, kwargs)
        try:
            outputs = graph.run(inputs)
        except Exception:
            if self._stale(dispatcher):
                return self.eager(args, kwargs)
            raise
        # Only now, since a GPU works meanwhile; what it makes of old weights is for nobody.
        if self._stale(dispatcher):
            return self.eager(args, kwargs)
        return graph.result(inputs, outputs)

    def _stale(self, dispatcher: Dispatcher) -> bool:
        """Whether the weights are others than those of tuned graphs, which are then dropped.

        Stand-ins that an exporter puts in place for now drop nothing.
        """
        if self._watch is None or self._watch.unchanged():
            return False
        if not self._watch.fake():
            self._drop_stale(dispatcher)
        return True

    def eager(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Run the wrapped module itself."""
        if self.no_eager is not None:
            self._fail_without_eager(None)
        if self._offloaded_from is not None:
            self.bring_back()
        return self.module.forward(*args, **kwargs)

    def bring_back(self) -> None:
        """Move offloaded weights back to the device they came from."""
        with self._lock:
            device = self._offloaded_from
            if device is not None:
                unchanged = self._watch is not None and self._watch.all_unchanged()
                _log.info(
                    "module %r: weights moved back to %s for an eager call", self.name, device
                )
                self.module.to(device)
                # Where weights were changed meanwhile, the old watch notices at the next call.
                if unchanged:
                    self._watch = WeightWatch(self.module)
                # Last, since calls that find it set wait for the lock above.
                self._offloaded_from = None

    def _drop_stale(self, dispatcher: Dispatcher) -> None:
        what = f"the weights of module {self.name!r} were changed or moved after tuning"
        if self.no_eager is not None:
            msg = (
                f"{what}, its tuned graphs hold the old ones, and {self.no_eager}. Undo the "
                "change, or make and tune the module anew, or load its file again"
            )
            raise InputMismatchError(msg, expected="the weights that were tuned", got="others")
        with self._lock:
            if self.dispatcher is not dispatcher:
                return
            self.dispatcher = None
        msg = (
            f"{what}; its tuned graphs hold the old ones and are dropped. Calls run eagerly until "
            "it is tuned again"
        )
        warnings.warn(msg, MissWarning, stacklevel=_STACK_LEVEL)

    def _missed(
        self,
        reason: InputMismatchError | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:  # noqa: ANN401
        if self.no_eager is not None:
            self._fail_without_eager(reason)
        if reason is None:
            return self.eager(args, kwargs)
        if self.on_miss == "error":
            # A new one, since the dispatcher keeps the reason for calls to come.
            raise InputMismatchError(
                str(reason), path=reason.path, expected=reason.expected, got=reason.got
            )
        self._warn_once(reason)
        try:
            return self.eager(args, kwargs)
        except Exception as error:
            error.add_note(f"aitune: module {self.name!r} ran eagerly because {reason}")
            raise

    def _fail_without_eager(self, reason: InputMismatchError | None) -> NoReturn:
        needed = "the call needs the eager module"
        if self.module.training:
            needed = "it is in training mode, which runs eagerly: call eval()"
        cause = reason or needed
        msg = f"module {self.name!r} cannot run this call: {cause}; {self.no_eager}"
        if reason is None:
            raise InputMismatchError(msg)
        raise InputMismatchError(
            msg, path=reason.path, expected=reason.expected, got=reason.got
        ) from reason

    def _warn_once(self, reason: InputMismatchError) -> None:
        if reason in self._warned_reasons:
            return
        text = str(reason)
        with self._lock:
            if len(self._warned_reasons) < _MAX_REASONS:
                self._warned_reasons.add(reason)
            key = re.sub(r"\d+", "#", text)  # another size is no other reason
            if key in self._warned or len(self._warned) >= _MAX_WARNINGS:
                return
            self._warned.add(key)
        msg = f"module {self.name!r} ran a call eagerly: {text}"
        warnings.warn(msg, MissWarning, stacklevel=_STACK_LEVEL)


def _transforming(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether PyTorch traces the call, transforms it, or takes forward-mode gradients of it."""
    return (
        # The flag is the process's: exports in other threads set it, too.
        (fx._symbolic_trace._is_fx_tracing_flag and _proxies(args, kwargs))  # noqa: SLF001
        or torch._C._get_tracing_state() is not None  # noqa: SLF001 - what jit.is_tracing() asks
        or torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001 - vmap, grad
        or forward_ad._current_level >= 0  # noqa: SLF001
    )


def _proxies(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return any(isinstance(value, fx.Proxy) for value in (*args, *kwargs.values()))


#: Frames between the user's call and a warning: Module.__call__, its implementation, forward,
#: `ModuleState.call`, two methods, and the one that warns.
_STACK_LEVEL: Final = 8

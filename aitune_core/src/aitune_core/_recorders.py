"""What takes the place of dispatch while a tuning records or tries candidates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from aitune_core._inputs import Call, calls_of, resized_call, to_device, unchanged
from aitune_core._module import Module, state_of
from aitune_core._recording import ModuleRecording
from aitune_core._refusals import check_call, check_initialised
from aitune_core._serving import ACTIVE_RECORDER, ModuleState, Recorder
from aitune_core.errors import RecordingError

__all__ = ["CallRecorder", "EagerOnly", "active", "record_calls"]


class CallRecorder:
    """Collects the calls of every wrapped module that is reached."""

    def __init__(self) -> None:
        self.recordings: dict[ModuleState, ModuleRecording] = {}
        self.notes: dict[ModuleState, list[str]] = {}
        self._modes: list[tuple[nn.Module, bool]] = []

    def record(self, state: ModuleState, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Run the call eagerly and note it."""
        state.bring_back()
        recording = self.recordings.get(state)
        if recording is None:
            check_initialised(state.name, state.module)
            recording = ModuleRecording(state.name, state.module, state.call_form)
            self.recordings[state] = recording
            self.notes[state] = []
        if state.module.training:
            self._modes += [(part, part.training) for part in state.module.modules()]
            state.module.eval()
            self.notes[state].append("was in training mode and is now in eval mode")
        return recording.record(args, kwargs)

    def restore_modes(self) -> None:
        """Put the parts of modules that were in training mode back into their modes."""
        for part, training in self._modes:
            part.training = training


class EagerOnly:
    """Keeps wrapped modules inside wrapped modules eager while candidates are tried."""

    def record(self, state: ModuleState, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Run the call eagerly."""
        return state.eager(args, kwargs)


@contextlib.contextmanager
def active(recorder: Recorder) -> Iterator[None]:
    """Let a recorder see the calls of wrapped modules in this context."""
    token = ACTIVE_RECORDER.set(recorder)
    try:
        yield
    finally:
        ACTIVE_RECORDER.reset(token)


def record_calls(  # noqa: PLR0913, PLR0917
    recorder: CallRecorder,
    func: Callable[..., object],
    input_data: object,
    batch_sizes: Sequence[int] | None,
    max_calls: int | None,
    device: torch.device | None,
) -> None:
    """Run a callable on the calls that users gave, and let a recorder see what it reaches.

    Args:
        recorder: Collects the calls of wrapped modules.
        func: As of `tune`.
        input_data: As of `tune`; tensors in it are left as they were.
        batch_sizes: As of `tune`.
        max_calls: As of `tune`.
        device: Where tensors of calls are moved; None leaves them.

    Raises:
        ConfigError: A call of a module holds what is no dense tensor.
        RecordingError: There was no call, or none reached a wrapped module.
    """
    count = 0
    with active(recorder), torch.no_grad():
        for call in calls_of(input_data, max_calls):
            if isinstance(func, Module):
                check_call(state_of(func).name, state_of(func).call_form, *call)
            for args, kwargs in _variants(call, batch_sizes, device):
                count += 1
                try:
                    with unchanged((args, kwargs)):
                        func(*args, **kwargs)
                except Exception as error:
                    error.add_note(
                        f"in call {count} of input_data, taken as {_words(args, kwargs)}"
                    )
                    raise
    if count == 0:
        msg = "input_data holds no calls; give at least one"
        raise RecordingError(msg)
    if not recorder.recordings:
        msg = (
            f"none of the {count} calls reached a wrapped module; wrap the modules that func "
            "calls with aitune_core.Module, and call them in the calling thread"
        )
        raise RecordingError(msg)


def _words(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Say how an element of ``input_data`` was understood."""
    kinds = [type(value).__name__ for value in args]
    kinds += [f"{name}={type(value).__name__}" for name, value in kwargs.items()]
    return (
        f"({', '.join(kinds)}); a call is a tensor, a tuple of arguments, a dict of keyword "
        "arguments, or (args, kwargs)"
    )


def _variants(
    call: Call, batch_sizes: Sequence[int] | None, device: torch.device | None
) -> Iterator[Call]:
    if device is not None:
        call = to_device(call, device)
    yield call
    for batch in batch_sizes or ():
        yield resized_call(call, batch)

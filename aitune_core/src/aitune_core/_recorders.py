"""What takes the place of dispatch while a tuning records or tries candidates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from aitune_core._module import ACTIVE_RECORDER, ModuleState, Recorder
from aitune_core._recording import ModuleRecording

__all__ = ["CallRecorder", "EagerOnly", "active"]


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

"""One run after the other on one GPU, whatever streams they are on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from aitune_backend_onnxruntime.cuda_driver import CudaDriver

__all__ = ["Timeline", "current_stream", "new_event"]


def current_stream(device_index: int) -> int:
    """Return the handle of PyTorch's current stream."""
    # The public way makes an object of it, which takes as long as all events of a call together.
    handle: int = torch._C._cuda_getCurrentRawStream(device_index)  # noqa: SLF001
    return handle


def new_event() -> torch.cuda.Event:
    """Return an event of the current device that exists; PyTorch makes it at the first use."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


class Timeline:
    """Puts each run of a session after the one before. Its caller holds a lock.

    Args:
        driver: The driver.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._owner = new_event()  # owns the handle
        self._last_run = self._owner.cuda_event
        self._stream: int | None = None

    def enter(self, stream: int) -> None:
        """Let what is queued next on ``stream`` wait for the last run."""
        if stream != self._stream and self._stream is not None:
            self._driver.wait(stream, self._last_run)

    def leave(self, stream: int) -> None:
        """Note that the last run is over when what is queued on ``stream`` is."""
        self._driver.record(self._last_run, stream)
        self._stream = stream

"""Device memory in use, and its peak while something runs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import torch

__all__ = ["PeakSampler", "ignore_captures", "used_bytes"]

_INTERVAL_SECONDS: Final = 0.005
#: ``CU_STREAM_CAPTURE_MODE_RELAXED``.
_RELAXED: Final = 2


def used_bytes(device: torch.device) -> int:
    """Return the bytes of a CUDA device that are in use, as its driver counts them.

    Memory of every process is counted, and what PyTorch keeps for later.
    """
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def ignore_captures() -> None:
    """Let this thread ask the driver while another thread captures a CUDA graph.

    Otherwise the question could break the capture.

    Raises:
        RuntimeError: The driver refuses.
    """
    mode = ctypes.c_int(_RELAXED)
    status = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if status:
        msg = f"cuThreadExchangeStreamCaptureMode gave {status}, expected 0"
        raise RuntimeError(msg)


class PeakSampler:
    """Looks at a number from a thread of its own and keeps the largest.

    Args:
        used: The number.
        prepare: Called first in the thread.

    Raises:
        Exception: On leaving: what ``used`` or ``prepare`` raised.
    """

    def __init__(self, used: Callable[[], int], prepare: Callable[[], object]) -> None:
        self._used = used
        self._prepare = prepare
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.peak = 0

    def __enter__(self) -> Self:
        """Start to look."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Look once more and end the thread."""
        self._stop.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _sample(self) -> None:
        try:
            self._prepare()
            stopped = False
            while not stopped:
                stopped = self._stop.wait(_INTERVAL_SECONDS)
                self.peak = max(self.peak, self._used())
        except Exception as error:  # noqa: BLE001 - raised again in the other thread
            self._error = error

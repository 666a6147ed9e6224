"""Time that calls take, on a CPU and on CUDA, and the memory in use meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

__all__ = ["Stopwatch", "memory_in_use", "stopwatch_for"]

#: Threads of one runtime go on spinning after a call and would slow the next runtime down.
_PAUSE_SECONDS: Final = 0.05
_STATM: Final = Path("/proc/self/statm")


class Stopwatch:
    """Times calls by the monotonic clock.

    Attributes:
        burst: Number of calls that are made without waiting for the one before, where only
            throughput counts.
    """

    burst: int = 1

    def seconds(self) -> float:
        """Return the time of a clock that never goes back."""
        return time.perf_counter()

    def time_ms(self, call: Callable[[], object], count: int = 1) -> float:
        """Return how long a call takes, as the mean of ``count`` calls, in milliseconds."""
        start = time.perf_counter_ns()
        for _ in range(count):
            call()
        return (time.perf_counter_ns() - start) / 1e6 / count

    def pause(self) -> None:
        """Let the threads of the runtime that ran last come to rest."""
        time.sleep(_PAUSE_SECONDS)

    def memory_bytes(self) -> int | None:
        """Return the memory of the device that is in use; None on a CPU."""
        return None


class _CudaStopwatch(Stopwatch):
    """Times calls by events on the current stream of a device.

    The device idles when a call begins, so that the host's share of the call counts as well.
    Only that stream is waited for: waiting for a device fails while a CUDA graph is captured.
    """

    burst = 8

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def time_ms(self, call: Callable[[], object], count: int = 1) -> float:
        stream = torch.cuda.current_stream(self._device)
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stream.synchronize()
        start.record(stream)
        for _ in range(count):
            call()
        end.record(stream)
        end.synchronize()
        return float(start.elapsed_time(end)) / count

    def pause(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def memory_bytes(self) -> int | None:
        return memory_in_use(self._device)


def stopwatch_for(device: torch.device) -> Stopwatch:
    """Return what times calls on ``device``."""
    return _CudaStopwatch(device) if device.type == "cuda" else Stopwatch()


def memory_in_use(device: torch.device) -> int | None:
    """Return memory in use in bytes: of a CUDA device as a whole, of this process on a CPU.

    None where the platform does not say. What other processes do on the device is counted.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    try:
        resident = int(_STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return resident * os.sysconf("SC_PAGE_SIZE")

"""Latency of executables, measured beside each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from aitune_core.results import Measurement

__all__ = ["measure"]

_WARM_UP_ROUNDS: Final = 3
_MIN_ROUNDS: Final = 4
_MIN_CALLS: Final = 10
_MAX_ROUNDS: Final = 50
_BUDGET_SECONDS: Final = 3.0
#: Threads of one runtime go on spinning after a call and would slow the next runtime down.
_PAUSE_SECONDS: Final = 0.05


def measure(
    executables: Sequence[Sequence[Callable[[], object]]],
    device: torch.device,
    budget_seconds: float | None = None,
) -> list[Measurement]:
    """Time executables in interleaved rounds.

    Each executable is a sequence of calls, one per sample. A round runs all samples through every
    executable in turn, so that drift of the machine falls on all of them alike; the order of the
    executables alternates. A turn begins with a pause and an untimed call. On CUDA each call is
    followed by a synchronisation of the current stream.

    Args:
        executables: For each executable one call per sample, the same samples in the same order.
        device: Where they run.
        budget_seconds: Time after which no round begins, once there are enough calls; None means
            3 seconds.

    Returns:
        One measurement per executable.
    """
    budget = _BUDGET_SECONDS if budget_seconds is None else budget_seconds
    times: list[list[float]] = [[] for _ in executables]
    for _ in range(_WARM_UP_ROUNDS):
        for calls in executables:
            for call in calls:
                call()
    turns = list(zip(times, executables, strict=True))
    start = time.perf_counter()
    for current in range(_MAX_ROUNDS):
        for timed, calls in turns:
            time.sleep(_PAUSE_SECONDS)
            calls[0]()
            timed.extend(_timed_ms(call, device) for call in calls)
        turns.reverse()
        enough = current + 1 >= _MIN_ROUNDS and len(times[0]) >= _MIN_CALLS
        if enough and time.perf_counter() - start > budget:
            break
    return [_summary(values) for values in times]


def _timed_ms(call: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter_ns()
    call()
    synchronize(device)
    return (time.perf_counter_ns() - start) / 1e6


def synchronize(device: torch.device) -> None:
    """Wait for the current stream of a CUDA device; nothing on a CPU.

    Not for the whole device, which fails while another thread captures a CUDA graph.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _summary(times_ms: Sequence[float]) -> Measurement:
    ordered = sorted(times_ms)

    def percentile(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return Measurement(
        p50_ms=percentile(0.5), p90_ms=percentile(0.9), p99_ms=percentile(0.99), calls=len(ordered)
    )

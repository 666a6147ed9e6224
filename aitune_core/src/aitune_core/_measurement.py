"""Latency of executables, measured beside each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from aitune_core.strategy import Measurement

__all__ = ["measure"]

_WARM_UP_ROUNDS: Final = 3
_MIN_ROUNDS: Final = 10
_MAX_ROUNDS: Final = 200
_BUDGET_SECONDS: Final = 2.0


def measure(
    executables: Sequence[Sequence[Callable[[], object]]], device: torch.device
) -> list[Measurement]:
    """Time executables in interleaved rounds.

    Each executable is a sequence of calls, one per sample. A round runs one sample through every
    executable, so that drift of the machine falls on all of them alike. On CUDA each call is
    followed by a synchronisation of the device.

    Args:
        executables: For each executable one call per sample, the same samples in the same order.
        device: Where they run.

    Returns:
        One measurement per executable.
    """
    count = len(executables[0])
    times: list[list[float]] = [[] for _ in executables]
    for _ in range(_WARM_UP_ROUNDS):
        for calls in executables:
            for call in calls[:count]:
                call()
    start = time.perf_counter()
    for current in range(_MAX_ROUNDS):
        for position, calls in enumerate(executables):
            times[position].append(_timed_ms(calls[current % count], device))
        if current + 1 >= _MIN_ROUNDS and time.perf_counter() - start > _BUDGET_SECONDS:
            break
    return [_summary(values) for values in times]


def _timed_ms(call: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter_ns()
    call()
    synchronize(device)
    return (time.perf_counter_ns() - start) / 1e6


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _summary(times_ms: Sequence[float]) -> Measurement:
    ordered = sorted(times_ms)

    def percentile(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return Measurement(
        p50_ms=percentile(0.5), p90_ms=percentile(0.9), p99_ms=percentile(0.99), calls=len(ordered)
    )

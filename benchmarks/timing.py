"""Latency of calls that are measured beside each other."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Final

from benchmarks.results import Timing

__all__ = ["LEAST_CALLS", "measured"]

LEAST_CALLS: Final = 100
#: Even, so that each contender comes first as often as another.
_ROUNDS: Final = 6
_WARM_UP_CALLS: Final = 10
_PILOT_CALLS: Final = 5
#: Share of a turn's calls that are made before it, untimed.
_UNTIMED_SHARE: Final = 0.1


def measured(
    contenders: Mapping[str, Callable[[], object]],
    *,
    synchronize: Callable[[], object],
    seconds: float,
    least_calls: int = LEAST_CALLS,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> dict[str, Timing]:
    """Time contenders in interleaved rounds, whose order alternates.

    A turn of a contender is: untimed calls, calls with a synchronisation after each, and
    back-to-back calls with one at the end. Drift of the machine falls on all alike. Results are
    dropped at once.

    Args:
        contenders: One call of each, by name; warmed up here.
        synchronize: Waits for the device.
        seconds: How long to time each kind of call of a contender, about.
        least_calls: Calls of each kind, at least.
        clock_ns: Nanoseconds of some clock.

    Returns:
        One timing per contender, in microseconds.
    """
    counts = {}
    for name, call in contenders.items():
        _singles(call, _WARM_UP_CALLS, synchronize, clock_ns)
        pilot_ns = statistics.median(_singles(call, _PILOT_CALLS, synchronize, clock_ns))
        wanted = max(least_calls, math.ceil(seconds * 1e9 / max(pilot_ns, 1)))
        counts[name] = math.ceil(wanted / _ROUNDS)
    singles: dict[str, list[int]] = {name: [] for name in contenders}
    totals = dict.fromkeys(contenders, 0)
    order = list(contenders)
    for _ in range(_ROUNDS):
        for name in order:
            call, count = contenders[name], counts[name]
            _block(call, math.ceil(_UNTIMED_SHARE * count), synchronize, clock_ns)
            singles[name] += _singles(call, count, synchronize, clock_ns)
            totals[name] += _block(call, count, synchronize, clock_ns)
        order.reverse()
    return {
        name: _timing(singles[name], totals[name] / (_ROUNDS * counts[name])) for name in contenders
    }


def _singles(
    call: Callable[[], object],
    count: int,
    synchronize: Callable[[], object],
    clock_ns: Callable[[], int],
) -> list[int]:
    times = []
    synchronize()
    for _ in range(count):
        start = clock_ns()
        call()
        synchronize()
        times.append(clock_ns() - start)
    return times


def _block(
    call: Callable[[], object],
    count: int,
    synchronize: Callable[[], object],
    clock_ns: Callable[[], int],
) -> int:
    synchronize()
    start = clock_ns()
    for _ in range(count):
        call()
    synchronize()
    return clock_ns() - start


def _timing(single_ns: list[int], pipelined_ns: float) -> Timing:
    tenths = statistics.quantiles(single_ns, n=10, method="inclusive")
    return Timing(
        p50_us=statistics.median(single_ns) / 1e3,
        p90_us=tenths[8] / 1e3,
        pipelined_us=pipelined_ns / 1e3,
        calls=len(single_ns),
    )

from __future__ import annotations

import pytest
from benchmarks.timing import measured


class Device:
    """A clock, and a device that works behind the back of its host."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.done_ns = 0

    def launch(self, host_ns: int, device_ns: int) -> None:
        self.now_ns += host_ns
        self.done_ns = max(self.done_ns, self.now_ns) + device_ns

    def synchronize(self) -> None:
        self.now_ns = max(self.now_ns, self.done_ns)

    def clock_ns(self) -> int:
        return self.now_ns


def test_single_calls_wait_for_the_device_and_back_to_back_calls_overlap_with_it() -> None:
    device = Device()
    timings = measured(
        {"call": lambda: device.launch(2_000, 10_000)},
        synchronize=device.synchronize,
        seconds=0.01,
        clock_ns=device.clock_ns,
    )
    found = timings["call"]
    assert found.p50_us == found.p90_us == 12.0
    # The launches of all calls but the first of a block hide behind the device's work.
    assert 10.0 < found.pipelined_us < 10.1


def test_percentiles_are_of_the_distribution() -> None:
    device = Device()
    calls = iter(range(10**6))

    def uneven() -> None:
        device.launch(50_000 if next(calls) % 5 == 0 else 1_000, 0)

    timings = measured(
        {"uneven": uneven},
        synchronize=device.synchronize,
        seconds=0,
        least_calls=500,
        clock_ns=device.clock_ns,
    )
    assert timings["uneven"].p50_us == 1.0
    assert timings["uneven"].p90_us == 50.0
    assert timings["uneven"].pipelined_us == pytest.approx(10.8, rel=0.01)


@pytest.mark.parametrize(
    ("seconds", "least_calls", "expected"),
    [
        (0.0, 120, 120),
        (0.012, 100, 1200),
        (0.0, 7, 12),  # rounded up to whole rounds
    ],
)
def test_calls_are_as_many_as_the_time_allows_and_at_least_so_many(
    seconds: float, least_calls: int, expected: int
) -> None:
    device = Device()
    timings = measured(
        {"call": lambda: device.launch(10_000, 0)},
        synchronize=device.synchronize,
        seconds=seconds,
        least_calls=least_calls,
        clock_ns=device.clock_ns,
    )
    assert timings["call"].calls == expected


def test_drift_falls_on_all_contenders_alike() -> None:
    device = Device()
    made: list[str] = []

    def slower_with_time(name: str) -> None:
        made.append(name)
        device.launch(1_000 + len(made), 0)

    timings = measured(
        {"one": lambda: slower_with_time("one"), "other": lambda: slower_with_time("other")},
        synchronize=device.synchronize,
        seconds=0,
        least_calls=1000,
        clock_ns=device.clock_ns,
    )
    assert timings["one"].p50_us == pytest.approx(timings["other"].p50_us, rel=0.01)
    assert timings["one"].pipelined_us == pytest.approx(timings["other"].pipelined_us, rel=0.01)
    assert timings["one"].p50_us > 2.0  # the drift is there

from __future__ import annotations

import functools
import time

import pytest
import torch

from aitune_core import Measurement
from aitune_core import _measurement as measurement
from aitune_core._measurement import measure

CPU = torch.device("cpu")


def test_executables_run_interleaved_on_the_same_samples() -> None:
    log: list[tuple[str, int]] = []

    def calls(name: str) -> list[functools.partial[None]]:
        return [functools.partial(log.append, (name, sample)) for sample in range(3)]

    first, second = measure([calls("a"), calls("b")], CPU)
    timed = log[measurement._WARM_UP_ROUNDS * 6 :]
    assert {name for name, _ in log[: -len(timed)]} == {"a", "b"}
    # A turn is one call that is not timed, and one timed call per sample.
    turns = [timed[start : start + 4] for start in range(0, len(timed), 4)]
    assert all(len({name for name, _ in turn}) == 1 for turn in turns)
    assert all([sample for _, sample in turn] == [0, 0, 1, 2] for turn in turns)
    order = [turn[0][0] for turn in turns]
    assert order == ["a", "b", "b", "a"] * (len(order) // 4)
    assert first.calls == second.calls == 3 * len(order) // 2


def test_slower_executable_has_higher_latency() -> None:
    slow, fast = measure([[lambda: time.sleep(0.002)], [lambda: None]], CPU)
    assert slow.p50_ms >= 2.0
    assert fast.p50_ms < 1.0
    for result in (slow, fast):
        assert 0.0 <= result.p50_ms <= result.p90_ms <= result.p99_ms


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "_BUDGET_SECONDS", 0.0)
    (result,) = measure([[lambda: None]], CPU)
    assert result.calls == max(measurement._MIN_ROUNDS, measurement._MIN_CALLS)


def test_percentiles_are_of_the_sorted_times() -> None:
    times = [float(value) for value in range(100, 0, -1)]
    assert measurement._summary(times) == Measurement(
        p50_ms=51.0, p90_ms=91.0, p99_ms=100.0, calls=100
    )
    assert measurement._summary([3.0]) == Measurement(p50_ms=3.0, p90_ms=3.0, p99_ms=3.0, calls=1)

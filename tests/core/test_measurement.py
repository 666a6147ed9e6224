from __future__ import annotations

import functools
import time
from collections.abc import Callable

import pytest
import torch
from clocks import NoisyClock, Quiet

from aitune_core._measurement import Contest, Executable, measure
from aitune_core._stopwatch import Stopwatch, memory_in_use, stopwatch_for

CPU = torch.device("cpu")


def executable(*calls: Callable[[], object], rows: int = 1) -> Executable:
    return Executable(calls, [rows] * len(calls))


@pytest.fixture(autouse=True)
def usual_rounds(monkeypatch: pytest.MonkeyPatch, quick_measurement: None) -> None:
    monkeypatch.setattr("aitune_core._measurement._LOOKS", (12, 24, 48, 96))
    monkeypatch.setattr("aitune_core._measurement._BUDGET_SECONDS", 6.0)


def test_executables_run_interleaved_on_the_same_samples() -> None:
    log: list[tuple[str, int]] = []

    def calls(name: str) -> Executable:
        return executable(*(functools.partial(log.append, (name, place)) for place in range(3)))

    clock = NoisyClock(Quiet, each_ms=4.0)
    contest = Contest([calls("a"), calls("b")], clock)
    contest.run(rounds=6)
    # A turn is an untimed call, then each sample; 4 ms leave no time for a second pass.
    turns = [log[start : start + 4] for start in range(len(log) - 48, len(log), 4)]
    assert all(len({name for name, _ in turn}) == 1 for turn in turns)
    assert all([sample for _, sample in turn] == [0, 0, 1, 2] for turn in turns)
    assert [turn[0][0] for turn in turns] == ["a", "b", "b", "a"] * 3
    assert clock.pauses == 12
    assert contest.measurement(0).calls == contest.measurement(1).calls == 18


def test_quick_calls_are_repeated_within_a_turn() -> None:
    clock = NoisyClock(Quiet, each_ms=0.1)
    contest = Contest([executable(lambda: None)], clock)
    contest.run(rounds=3)
    assert contest.measurement(0).calls == 3 * 16


def test_slower_executable_has_higher_latency_by_a_real_clock() -> None:
    slow, fast = measure(
        [executable(lambda: time.sleep(0.002)), executable(lambda: None)], stopwatch_for(CPU)
    )
    assert slow.p50_ms >= 2.0
    assert fast.p50_ms < 1.0
    for result in (slow, fast):
        assert 0.0 <= result.p50_ms <= result.p90_ms <= result.p99_ms
        assert result.times_ms
        assert result.peak_memory_bytes is None


def test_rates_follow_from_the_typical_call() -> None:
    clock = NoisyClock(Quiet, each_ms=20.0)
    contest = Contest([executable(lambda: None, lambda: None, rows=8)], clock)
    contest.run(rounds=3)
    result = contest.measurement(0)
    assert result.calls_per_second == pytest.approx(50.0)
    assert result.samples_per_second == pytest.approx(400.0)
    assert result.batch_size == 8


def test_rounds_end_when_it_is_clear_which_is_faster() -> None:
    clock = NoisyClock(Quiet)
    contest = Contest([clock.executable(2.0), clock.executable(1.0)], clock)
    contest.run()
    assert contest.ratio(1, 0).rounds == 12
    assert contest.ratio(1, 0).value == pytest.approx(2.0)


def test_rounds_end_when_time_is_over_but_not_before_there_are_enough() -> None:
    clock = NoisyClock(seed=3)
    contest = Contest([clock.executable(2.0), clock.executable(2.0)], clock)
    contest.run(seconds=0.0)
    assert contest.ratio(1, 0).rounds == 12


def test_samples_are_left_out_where_rounds_would_take_too_long() -> None:
    clock = NoisyClock(Quiet)
    slow = [clock.executable(1000.0, samples=8) for _ in range(2)]
    contest = Contest(slow, clock)
    contest.run(seconds=30.0)
    assert clock.seconds() < 60.0
    assert contest.ratio(1, 0).rounds >= 12


def test_hopeless_executables_stop_early_and_keep_their_figures() -> None:
    clock = NoisyClock(seed=5)
    speeds = [1.0, 1.0, 3.0]
    contest = Contest([clock.executable(speed) for speed in speeds], clock)
    contest.run()
    assert contest.ratio(2, 0).rounds == 12
    assert contest.ratio(1, 0).rounds > 12
    assert contest.measurement(2).p50_ms == pytest.approx(3.0, rel=0.2)


def test_executable_that_raises_is_taken_out_and_the_others_go_on() -> None:
    count = 0

    def breaks() -> None:
        nonlocal count
        count += 1
        if count > 20:
            msg = "out of luck"
            raise RuntimeError(msg)

    contest = Contest([executable(lambda: None), executable(breaks)], stopwatch_for(CPU))
    contest.run(rounds=5)
    assert "out of luck" in str(contest.error(1))
    assert contest.error(0) is None
    assert contest.measurement(0).calls >= 5


def test_measure_raises_what_an_executable_raises() -> None:
    def breaks() -> None:
        msg = "broken"
        raise ValueError(msg)

    with pytest.raises(ValueError, match="broken"):
        measure([executable(lambda: None), executable(breaks)], stopwatch_for(CPU))


def test_times_per_row_are_compared_where_samples_differ() -> None:
    clock = NoisyClock(Quiet)
    baseline, large = clock.executable(1.0, rows=1), clock.executable(4.0, rows=16)
    contest = Contest([baseline, large], clock, by_rows=True)
    contest.run()
    assert contest.ratio(1, 0).value == pytest.approx(4.0)


def test_bursts_decide_and_latencies_are_of_single_calls() -> None:
    class Pipelined(NoisyClock):
        burst = 8

        def time_ms(self, call: Callable[[], object], count: int = 1) -> float:
            return super().time_ms(call, count) / (4.0 if count > 1 else 1.0)

    clock = Pipelined(Quiet)
    contest = Contest([clock.executable(1.0), clock.executable(1.0)], clock, burst=True)
    contest.run(rounds=4)
    assert contest.measurement(0).p50_ms == pytest.approx(1.0)
    assert contest.measurement(0).calls_per_second == pytest.approx(4000.0)


def test_many_times_are_thinned_out_in_the_result() -> None:
    clock = NoisyClock(Quiet, each_ms=0.01)
    contest = Contest([executable(lambda: None)], clock)
    contest.run(rounds=90)
    result = contest.measurement(0)
    assert result.calls == 90 * 16
    assert 256 <= len(result.times_ms) <= 512


def test_memory_in_use_grows_with_what_a_process_holds() -> None:
    before = memory_in_use(CPU)
    held = torch.ones(64 * 2**20 // 4)
    after = memory_in_use(CPU)
    assert before is not None
    assert after is not None
    assert after - before > 32 * 2**20
    assert held.sum() > 0


def test_time_is_the_mean_of_a_burst() -> None:
    assert Stopwatch().time_ms(lambda: time.sleep(0.001), 3) >= 1.0

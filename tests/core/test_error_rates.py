"""How often a choice is wrong on a machine with noise, over 1,000 simulated tunings each."""

from __future__ import annotations

import pytest
from clocks import NoisyClock

from aitune_core._measurement import Contest

TUNINGS = 1000
#: Long enough for one call per turn only, so that its noise is not averaged out.
MS = 12.0


@pytest.fixture(autouse=True)
def usual_rounds(monkeypatch: pytest.MonkeyPatch, quick_measurement: None) -> None:
    monkeypatch.setattr("aitune_core._measurement._LOOKS", (12, 24, 48, 96))
    monkeypatch.setattr("aitune_core._measurement._BUDGET_SECONDS", 6.0)


def tuned(seed: int, *milliseconds: float) -> Contest:
    clock = NoisyClock(seed=seed)
    contest = Contest([clock.executable(ms) for ms in milliseconds], clock)
    contest.run()
    return contest


def test_equal_candidates_win_in_under_5_percent_of_tunings() -> None:
    wrong = 0
    for seed in range(TUNINGS):
        contest = tuned(seed, MS, MS, MS)
        # Against eager, or the second against the first.
        wrong += any(contest.ratio(one, other).faster for one, other in ((1, 0), (2, 0), (2, 1)))
    assert wrong < 0.05 * TUNINGS


def test_gain_of_3_percent_is_found_in_over_90_percent_of_tunings() -> None:
    found = sum(tuned(seed, MS, MS / 1.03).ratio(1, 0).faster for seed in range(TUNINGS))
    assert found > 0.9 * TUNINGS


def test_loss_of_3_percent_never_wins() -> None:
    assert not any(tuned(seed, MS, MS * 1.03).ratio(1, 0).faster for seed in range(TUNINGS))

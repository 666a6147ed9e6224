from __future__ import annotations

import threading

import pytest
from benchmarks.memory import PeakSampler


def test_peak_within_the_block_is_kept() -> None:
    values = [3]
    looked = threading.Event()

    def used() -> int:
        if values[0] == 9:
            looked.set()
        return values[0]

    with PeakSampler(used, lambda: None) as sampler:
        values[0] = 9
        assert looked.wait(10)
        values[0] = 4
    assert sampler.peak == 9


def test_a_block_without_a_look_in_it_is_looked_at_once() -> None:
    with PeakSampler(lambda: 5, lambda: None) as sampler:
        pass
    assert sampler.peak == 5


def test_failure_of_a_look_is_raised_after_the_block() -> None:
    def broken() -> int:
        raise LookupError

    with pytest.raises(LookupError), PeakSampler(broken, lambda: None):
        pass


def test_failure_of_the_block_comes_first() -> None:
    def broken() -> int:
        raise LookupError

    with pytest.raises(KeyError), PeakSampler(broken, lambda: None):
        raise KeyError

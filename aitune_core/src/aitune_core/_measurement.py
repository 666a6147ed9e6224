"""Executables timed beside each other, in interleaved rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import attrs

from aitune_core._statistics import paired_ratio, percentile
from aitune_core._stopwatch import Stopwatch
from aitune_core.results import Measurement, Ratio

__all__ = ["Contest", "Executable", "measure"]

_WARM_UP_PASSES: Final = 3
_MAX_WARM_UP_PASSES: Final = 20
#: A pass that is no more than this many times as long as the shortest before it is a stable one.
_STABLE: Final = 1.05
#: After so many rounds it is looked at whether more are needed.
_LOOKS: Final = (12, 24, 48, 96)
_BUDGET_SECONDS: Final = 6.0
#: A turn repeats quick calls until it is as long as this, but not more often than so many times.
_TURN_MS: Final = 10.0
_MAX_PASSES: Final = 16
_MAX_KEPT_TIMES: Final = 512
#: Ratio, for sure, under which an executable has no hope to be the fastest.
_HOPELESS: Final = 0.9
#: Executables that differ by less than this, for sure, need no further rounds.
_SAME: Final = 0.01

_Calls: TypeAlias = Sequence[Callable[[], object]]


@attrs.frozen
class Executable:
    """What is timed.

    Attributes:
        calls: One call per sample.
        rows: Rows along the batch axis of each sample.
    """

    calls: _Calls
    rows: Sequence[int]


@attrs.define
class _Turns:
    """What was timed of one executable."""

    executable: Executable
    passes: int = 1
    #: Per round, the time of one call of each sample, in ms.
    rounds: list[float] = attrs.field(factory=list)
    times: list[float] = attrs.field(factory=list)
    memory_bytes: int | None = None
    error: Exception | None = None
    running: bool = True


class Contest:
    """Times executables in interleaved rounds.

    A round runs all samples through every executable in turn, so that drift of the machine falls
    on all of them alike; the order of the executables alternates. A turn begins with a pause and
    an untimed call; quick calls are repeated. An executable that raises is taken out.

    Args:
        executables: The baseline first; the same samples in the same order for all.
        stopwatch: What times them.
        by_rows: Whether the time per row counts, where executables have other samples.
        burst: Whether rounds are of calls that do not wait for one another, where the device
            allows that; latencies are of single calls all the same.
    """

    def __init__(
        self,
        executables: Sequence[Executable],
        stopwatch: Stopwatch,
        *,
        by_rows: bool = False,
        burst: bool = False,
    ) -> None:
        self._turns = [_Turns(executable) for executable in executables]
        self._stopwatch = stopwatch
        self._by_rows = by_rows
        self._burst = stopwatch.burst if burst else 1

    @property
    def budget_seconds(self) -> float:
        """Time after which no round begins, once there are enough, unless `run` is told another."""
        return _BUDGET_SECONDS * len(self._turns)

    def run(self, seconds: float | None = None, *, rounds: int | None = None) -> None:
        """Time the executables until it is clear which is the fastest.

        Args:
            seconds: Time after which no round begins, once there are enough; None means 6
                seconds for each executable.
            rounds: Run so many rounds, whatever is clear then.
        """
        start = self._stopwatch.seconds()
        limit = self.budget_seconds if seconds is None else seconds
        enough, most = (rounds or _LOOKS[0], rounds or _LOOKS[-1])
        self._guarded(self._turns[0], lambda turns: self._thin_out(turns, limit, enough))
        for turns in self._turns:
            self._guarded(turns, self._warm_up)
        for done in range(1, most + 1):
            for turns in self._turns[:: 1 if done % 2 else -1]:
                self._guarded(turns, self._turn)
            if done < enough:
                continue
            if done in _LOOKS and self._settled():
                return
            if self._stopwatch.seconds() - start > limit:
                return

    def _thin_out(self, baseline: _Turns, seconds: float, rounds: int) -> None:
        """Leave out samples where the least number of rounds would take too long; one stays."""
        calls = baseline.executable.calls
        taken_ms = sum(self._stopwatch.time_ms(call) for call in calls)
        share = seconds * 1e3 / max(taken_ms * rounds * len(self._turns), 1e-6)
        count = max(1, min(len(calls), int(share * len(calls))))
        places = [(2 * place + 1) * len(calls) // (2 * count) for place in range(count)]
        for turns in self._turns:
            turns.executable = Executable(
                [turns.executable.calls[place] for place in places],
                [turns.executable.rows[place] for place in places],
            )

    def _guarded(self, turns: _Turns, step: Callable[[_Turns], None]) -> None:
        if not turns.running:
            return
        try:
            step(turns)
        except Exception as error:  # noqa: BLE001 - one that fails costs only itself
            turns.running, turns.error = False, error

    def _warm_up(self, turns: _Turns) -> None:
        """Run all samples until they take no less time than before."""
        shortest = float("inf")
        for done in range(1, _MAX_WARM_UP_PASSES + 1):
            taken = sum(self._stopwatch.time_ms(call) for call in turns.executable.calls)
            if done >= _WARM_UP_PASSES and shortest <= taken <= shortest * _STABLE:
                break
            shortest = min(shortest, taken)
        turns.passes = max(1, min(_MAX_PASSES, int(_TURN_MS / max(shortest, 1e-6))))

    def _turn(self, turns: _Turns) -> None:
        calls = turns.executable.calls
        self._stopwatch.pause()
        calls[0]()
        passes = [self._pass(calls, 1) for _ in range(turns.passes)]
        turns.times.extend(time for times in passes for time in times)
        if self._burst > 1:
            passes = [self._pass(calls, self._burst)]
        turns.rounds.append(sum(statistics.median(times) for times in zip(*passes, strict=True)))
        used = self._stopwatch.memory_bytes()
        if used is not None:
            turns.memory_bytes = max(used, turns.memory_bytes or 0)

    def _pass(self, calls: _Calls, count: int) -> list[float]:
        return [self._stopwatch.time_ms(call, count) for call in calls]

    def _settled(self) -> bool:
        """Whether it is clear which is the fastest; stops those that have no hope."""
        running = [place for place, turns in enumerate(self._turns) if turns.running]
        if len(running) < 2:  # noqa: PLR2004 - one alone is the fastest
            return True
        best = min(running, key=self._typical)
        clear = True
        for place in running:
            if place == best:
                continue
            ratio = self.ratio(place, best)
            if place and ratio.high < _HOPELESS:
                self._turns[place].running = False
            same = ratio.low > 1.0 - _SAME and ratio.high < 1.0 + _SAME
            clear &= ratio.slower or same
        return clear

    def _typical(self, place: int) -> float:
        turns = self._turns[place]
        return statistics.median(turns.rounds) / self._scale(turns)

    def _scale(self, turns: _Turns) -> int:
        return sum(turns.executable.rows) if self._by_rows else 1

    def error(self, place: int) -> Exception | None:
        """Return what an executable raised; None where it did not."""
        return self._turns[place].error

    def ratio(self, first: int, second: int) -> Ratio:
        """Return how many times as fast one executable is as another, each by its place."""
        one, other = self._turns[first], self._turns[second]
        return paired_ratio(
            [time / self._scale(one) for time in one.rounds],
            [time / self._scale(other) for time in other.rounds],
        )

    def measurement(self, place: int) -> Measurement:
        """Return the latencies of an executable."""
        turns = self._turns[place]
        rows = turns.executable.rows
        typical_seconds = statistics.median(turns.rounds) / 1e3
        step = -(-len(turns.times) // _MAX_KEPT_TIMES)
        return Measurement(
            p50_ms=percentile(turns.times, 0.5),
            p90_ms=percentile(turns.times, 0.9),
            p99_ms=percentile(turns.times, 0.99),
            calls=len(turns.times),
            calls_per_second=len(rows) / typical_seconds,
            samples_per_second=sum(rows) / typical_seconds,
            batch_size=rows[0] if len(set(rows)) == 1 else None,
            peak_memory_bytes=turns.memory_bytes,
            times_ms=tuple(turns.times[::step]),
        )


def measure(
    executables: Sequence[Executable], stopwatch: Stopwatch, seconds: float | None = None
) -> list[Measurement]:
    """Time executables beside each other; one that raises makes this raise.

    Args:
        executables: The same samples in the same order for all.
        stopwatch: What times them.
        seconds: As that of `Contest.run`.
    """
    contest = Contest(executables, stopwatch)
    contest.run(seconds)
    for place in range(len(executables)):
        error = contest.error(place)
        if error is not None:
            raise error
    return [contest.measurement(place) for place in range(len(executables))]

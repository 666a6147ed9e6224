"""A clock that goes as a busy machine's: noise of calls and turns, drift, outliers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import attrs

from aitune_core._measurement import Executable
from aitune_core._stopwatch import Stopwatch


@attrs.frozen
class Noise:
    """How times vary, as shares of themselves.

    Attributes:
        call: Of each call on its own.
        turn: Of all calls of one turn, and of no other.
        drift: Steps of what drifts, for all executables alike.
        outliers: Share of calls that take 1.5 to 3 times as long.
    """

    call: float = 0.03
    turn: float = 0.01
    drift: float = 0.03
    outliers: float = 0.02


Quiet = Noise(0.0, 0.0, 0.0, 0.0)


class NoisyClock(Stopwatch):
    """Times calls that say how many milliseconds they take, or take ``each_ms``."""

    def __init__(self, noise: Noise | None = None, *, seed: int = 0, each_ms: float = 1.0) -> None:
        self._noise = Noise() if noise is None else noise
        self._random = random.Random(seed)
        self._each_ms = each_ms
        self._now = self._drift = self._turn = 0.0
        self.pauses = 0

    def executable(self, ms: float, *, samples: int = 1, rows: int = 1) -> Executable:
        return Executable([lambda: ms] * samples, [rows] * samples)

    def seconds(self) -> float:
        return self._now

    def pause(self) -> None:
        self.pauses += 1
        self._now += 0.05
        self._drift = 0.9 * self._drift + self._random.gauss(0.0, self._noise.drift)
        self._turn = self._random.gauss(0.0, self._noise.turn)

    def time_ms(self, call: Callable[[], object], count: int = 1) -> float:
        for _ in range(count):
            says = call()
        ms = says if isinstance(says, float) else self._each_ms
        own = self._random.gauss(0.0, self._noise.call)
        ms *= math.exp(self._drift + self._turn + own)
        if self._random.random() < self._noise.outliers:
            ms *= self._random.uniform(1.5, 3.0)
        self._now += ms * count / 1e3
        return ms

"""Which of two executables is faster, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from aitune_core.results import Ratio

__all__ = ["CONFIDENCE", "midmean", "paired_ratio", "percentile"]

#: Of each interval. Rounds are looked at several times while they run, and each look is a chance
#: to be wrong, so that less than 0.01 is left for each side.
CONFIDENCE: Final = 0.99
_RESAMPLES: Final = 1000
_SEED: Final = 20_231


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of some values lie, by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def midmean(values: Tensor) -> Tensor:
    """Return the mean of the middle half along the last axis; outliers on either side count little.

    It varies less than a median where there are no outliers.
    """
    count = values.shape[-1]
    cut = count // 4
    return values.sort(dim=-1).values[..., cut : count - cut].mean(dim=-1)


def paired_ratio(
    first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE
) -> Ratio:
    """Return how many times as fast the first executable is as the second.

    The rounds are paired: each gives one ratio, so that what slows a whole round down falls out.
    The interval is a bootstrap over rounds, with a fixed seed: the same times give the same.

    Args:
        first: Time of the first executable in each round.
        second: Time of the second in the same rounds; at least as many.
        confidence: Share of such intervals that hold the true ratio.
    """
    rounds = min(len(first), len(second))
    times = torch.tensor([first[:rounds], second[:rounds]], dtype=torch.float64)
    logs = (times[1] / times[0]).log()
    generator = torch.Generator().manual_seed(_SEED)
    picked = torch.randint(rounds, (_RESAMPLES, rounds), generator=generator)
    means = midmean(logs[picked]).sort().values
    tail = int((1.0 - confidence) / 2 * _RESAMPLES)
    return Ratio(
        value=math.exp(float(midmean(logs))),
        low=math.exp(float(means[tail])),
        high=math.exp(float(means[_RESAMPLES - 1 - tail])),
        confidence=confidence,
        rounds=rounds,
    )

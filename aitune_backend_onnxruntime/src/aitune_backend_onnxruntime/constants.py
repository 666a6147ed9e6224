"""Constants that are close to a neutral one are kept.

The exporter's rewriter takes numbers within 1e-8 of 0, and within a share of 1e-5 of 1, for 0 and
1, and drops what adds or multiplies by them: the epsilon that keeps a division from dividing by 0.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final
from unittest import mock

from onnxscript.rewriter import _matcher

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["exact_constants"]

#: Half a unit in the last place of float32, in which constants of patterns may be written.
_ROUNDING: Final = 2.0**-24


@contextmanager
def exact_constants() -> Iterator[None]:
    """Compare constants with those of rewriting patterns exactly, but for rounding to float32.

    Other threads that rewrite models meanwhile compare so, too.
    """
    with mock.patch.object(_matcher, "math", SimpleNamespace(isclose=_is_equal)):
        yield


def _is_equal(value: float, pattern: float, *, rel_tol: float, abs_tol: float) -> bool:
    del rel_tol, abs_tol  # those of the pattern, which are too wide
    return math.isclose(value, pattern, rel_tol=_ROUNDING)

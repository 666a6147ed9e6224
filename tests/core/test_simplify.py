"""Conditions on one dim become its range or its divisor, where that says all they say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import with_dims

from aitune_core._simplify import simplified
from aitune_core.conditions import SizeCondition
from aitune_core.specs import DynamicDim, GraphSpec


def _simplified(graph: GraphSpec, *texts: str) -> list[str]:
    return [one.text for one in simplified(graph, [*map(SizeCondition, texts)])]


HEIGHT, WIDTH = DynamicDim("height", 32, 96), DynamicDim("width", 64, 128)


@pytest.mark.parametrize(
    ("texts", "short"),
    [
        (["height % 2 == 0", "height // 2 % 2 != 1", "-height // 4 % 4 <= 0"], "height % 16 == 0"),
        (["height % 2 == 1", "height % 3 == 0"], "height % 6 == 3"),
        (["height // 2 * 2 != height"], "height % 2 == 1"),
        (["height * 3 < 2 * 96 - 20", "height > 1"], "height <= 57"),
        (["height + 3 > 50", "height + 3 > 40"], "height >= 48"),
        (["height + 3 > 50", "height * 2 < 140"], "48 <= height <= 69"),
        (["(height - 77) ** 2 > 0"], "height != 77"),
        (["(height + 1) % 5 // 4 == 0"], "height % 5 != 3"),
        (["height * 2 + 3 == 77", "height > 3"], "height == 37"),
    ],
)
def test_meaning_is_said_in_few_words(texts: list[str], short: str) -> None:
    assert _simplified(with_dims(HEIGHT), *texts) == [short]


def test_conditions_on_several_dims_and_short_ones_stay() -> None:
    texts = ["height % 2 == 0", "height * width < 4000", "width < 100 or width % 7 == 0"]
    assert _simplified(with_dims(HEIGHT, WIDTH), *texts) == texts


def test_conditions_that_nothing_meets_and_wide_ranges_stay() -> None:
    texts = ["height < 3 and height > 5"]
    assert _simplified(with_dims(HEIGHT), *texts) == texts
    wide = ["length + 1 > 4 + 4"]
    assert _simplified(with_dims(DynamicDim("length", 1, 10_000_000)), *wide) == wide


@given(
    st.lists(
        st.sampled_from(
            [
                f"(height + {a}) // {b} % {c} {op} {d}"
                for a in (0, 1)
                for b in (1, 2)
                for c in (2, 3)
                for op in ("==", "!=", "<=")
                for d in (0, 1)
            ]
        ),
        min_size=1,
        max_size=4,
    )
)
def test_meaning_stays(texts: list[str]) -> None:
    short = simplified(with_dims(HEIGHT), [*map(SizeCondition, texts)])
    for size in range(HEIGHT.min, HEIGHT.max + 1):
        sizes = {"height": size}
        wanted = all(SizeCondition(text).holds(sizes) for text in texts)
        assert all(one.holds(sizes) for one in short) == wanted

"""Conditions on sizes are kept where an engine differs from eager without them, and only there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from samples import with_dims

from aitune_core import DynamicDim, GraphSpec, SizeCondition
from aitune_core._limits import breaking_sizes, needed_conditions

PAST, NEW = DynamicDim("past", 0, 30), DynamicDim("new", 1, 5)
MASK = DynamicDim("mask", 1, 35)


def broken(graph: GraphSpec, text: str, *others: str) -> tuple[list[dict[str, int]], bool]:
    return breaking_sizes(graph, SizeCondition(text), [*map(SizeCondition, others)], 8)


def test_breaking_sizes_are_inside_the_ranges_and_break_the_condition_alone() -> None:
    graph = with_dims(PAST, NEW, MASK)
    sizes, _ = broken(graph, "past % 4 == 0", "new > 2", "mask < 20")
    assert len(sizes) == 8
    for one in sizes:
        assert one["past"] % 4
        assert one["past"] in range(31)
        assert one["new"] > 2
        assert one["mask"] < 20
    assert len({one["past"] % 4 for one in sizes}) == 3


def test_condition_that_follows_from_others_is_never_broken_alone() -> None:
    graph = with_dims(PAST, NEW)
    assert broken(graph, "past % 2 == 0", "past % 4 == 0") == ([], True)
    assert broken(graph, "past >= 0") == ([], True)
    assert broken(graph, "past + new < 40", "new < 3", "past < 8") == ([], True)


def test_sizes_of_other_dims_are_looked_for_at_which_a_condition_breaks_alone() -> None:
    graph = with_dims(PAST, NEW)
    sizes, _ = broken(graph, "past % 2 == 0", "past % 2 == 0 or new == 1")
    assert len(sizes) == 8
    assert {one["new"] for one in sizes} == {1}


def test_condition_is_not_said_to_follow_from_one_on_other_dims() -> None:
    graph = with_dims(PAST, NEW)
    assert broken(graph, "past % 2 == 0", "new > 100") == ([], False)


def test_rare_sizes_in_long_ranges_are_found_by_the_numbers_of_the_condition() -> None:
    graph = with_dims(DynamicDim("length", 1, 10_000_000))
    assert broken(graph, "length != 777_777") == ([{"length": 777_777}], False)
    assert broken(graph, "length > 0") == ([], False)


def test_dims_that_follow_need_not_be_tried() -> None:
    graph = with_dims(PAST, NEW, MASK, conditions=("mask == past + new",))
    assert broken(graph, "new + past == mask") == ([], True)
    sizes, _ = broken(graph, "mask != 17")
    assert {one["mask"] for one in sizes} == {17}


def kept(
    graph: GraphSpec, special: str, conditions: Sequence[str], *, follow: bool = True
) -> list[str]:
    """Return the conditions that an engine needs which does not know a special case.

    The code reads ``if <first condition>: same; elif <special>: other; else: same``, so that its
    paths are three.
    """
    other = SizeCondition(special)
    first = SizeCondition(conditions[0])
    outside = SizeCondition(f"not ({conditions[0]})")

    def agrees(sizes: Mapping[str, int]) -> bool:
        return first.holds(sizes) or not other.holds(sizes)

    def assumed(sizes: Mapping[str, int]) -> list[SizeCondition]:
        if first.holds(sizes):
            return [first]
        branch = special if other.holds(sizes) else f"not ({special})"
        return [outside, SizeCondition(branch)]

    asked = [*map(SizeCondition, conditions)]
    return [
        one.text for one in needed_conditions(graph, asked, agrees, assumed if follow else None)
    ]


@pytest.mark.parametrize("high", [256, 1000, 4096])
@pytest.mark.parametrize("divisor", [2, 7, 16, 64, 100])
@pytest.mark.parametrize("bound", [16, 64, 100])
def test_branch_behind_a_branch_is_found(high: int, divisor: int, bound: int) -> None:
    graph = with_dims(DynamicDim("n", 1, high))
    condition = f"n <= {bound}"
    assert kept(graph, f"n % {divisor} == 0", [condition]) == [condition]
    assert kept(graph, f"n == {high - 5}", [condition]) == [condition]
    assert kept(graph, f"n > {high}", [condition]) == []


def test_branch_behind_a_branch_on_another_dim_is_found() -> None:
    graph = with_dims(DynamicDim("batch", 1, 64), DynamicDim("length", 1, 2048))
    for special in (
        "length % 7 == 0",
        "length == 1999",
        "length * batch > 2000",
        "length % 512 == 0",
    ):
        assert kept(graph, special, ["batch != 1"]) == ["batch != 1"]
    assert kept(graph, "length > 2048", ["batch != 1"]) == []


def test_without_a_way_to_follow_the_code_samples_decide() -> None:
    graph = with_dims(DynamicDim("n", 1, 4096))
    assert kept(graph, "n % 2 == 0", ["n <= 100"], follow=False) == ["n <= 100"]
    assert kept(graph, "n == 1999", ["n <= 100"], follow=False) == []


def test_code_of_too_many_paths_keeps_the_condition() -> None:
    graph = with_dims(DynamicDim("n", 1, 4096))
    conditions = (SizeCondition("n < 100"),)
    # One path for each size, as of a loop.
    got = needed_conditions(
        graph, conditions, lambda _: True, lambda sizes: [SizeCondition(f"n == {sizes['n']}")]
    )
    assert got == conditions


def test_code_that_cannot_be_followed_keeps_the_condition() -> None:
    def cannot(_: Mapping[str, int]) -> list[SizeCondition]:
        raise RuntimeError

    graph = with_dims(DynamicDim("n", 1, 4096))
    conditions = (SizeCondition("n < 100"),)
    assert needed_conditions(graph, conditions, lambda _: True, cannot) == conditions


def test_recorded_call_that_breaks_a_condition_excuses_only_sizes_that_eager_refuses() -> None:
    graph = with_dims(DynamicDim("rows", 1, 40), DynamicDim("others", 1, 40))
    conditions = (SizeCondition("others == rows"),)
    recorded = [{"rows": 4, "others": 4}, {"rows": 4, "others": 1}]

    def broadcasts(sizes: Mapping[str, int]) -> bool | None:
        return True if sizes["others"] in {1, sizes["rows"]} else None

    def one(sizes: Mapping[str, int]) -> list[SizeCondition]:
        return [SizeCondition("others == 1" if sizes["others"] == 1 else "others == rows")]

    assert needed_conditions(graph, conditions, broadcasts, one, recorded) == ()
    assert needed_conditions(graph, conditions, broadcasts, one, recorded[:1]) == conditions

    def endless(sizes: Mapping[str, int]) -> list[SizeCondition]:
        return [SizeCondition(f"{name} == {size}") for name, size in sizes.items()]

    got = needed_conditions(graph, conditions, lambda _: True, endless, recorded)
    assert got == conditions

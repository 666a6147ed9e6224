"""The tables as pictures, readable in greyscale."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import attrs
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from benchmarks.overhead import Overhead
from benchmarks.plan import BATCHES, CASES, CONTENDERS, HEADLINE_BATCH, TARGETS, Case
from benchmarks.results import Results, Row
from benchmarks.tables import ratio_text

__all__ = ["build_figure", "latency_figure", "memory_figure", "overhead_figure", "target_figure"]

_WIDTH: Final = 9.0
#: Inches per bar, between groups of bars, and around all.
_BAR_HEIGHT: Final = 0.24
_GAP_HEIGHT: Final = 0.18
_MARGIN_HEIGHT: Final = 1.2
#: Share of the place of a group that its bars take.
_FILLED: Final = 0.8
#: Room on the right for the numbers, as a factor of a logarithmic axis and of a plain one.
_LOG_ROOM: Final = 2.0
_ROOM: Final = 1.15
_GIB: Final = 2**30


@attrs.frozen
class _Series:
    """Bars of one kind: a length per group, None where there is no figure.

    Marks are lengths of something else at the same place; the number comes after both.
    """

    label: str
    lengths: Sequence[float | None]
    colour: str
    hatch: str
    marks: Sequence[float | None] = ()


#: Colours that are told apart in grey too, with a pattern.
_LIGHT: Final = ("#dddddd", "")
_MIDDLE: Final = ("#a6a6a6", "////")
_DARK: Final = ("#1f4e79", "")
_WHITE: Final = ("#ffffff", "....")
_CONTENDER_STYLES: Final = {"eager": _LIGHT, "compile": _MIDDLE, "ours": _DARK}


def latency_figure(results: Results) -> Figure | None:
    """Draw the times of every row that has some, one panel per batch size; None without any."""
    panels = [(batch, cases) for batch in BATCHES if (cases := _timed(results, batch))]
    if not panels:
        return None
    heights = [_height(len(cases), len(CONTENDERS)) for _, cases in panels]
    figure = Figure((_WIDTH, sum(heights) + len(panels) * 0.3 + _MARGIN_HEIGHT))
    figure.set_layout_engine("constrained")
    ratios = {"height_ratios": heights}
    axes = figure.subplots(len(panels), squeeze=False, sharex=True, gridspec_kw=ratios)[:, 0]
    for axis, (batch, cases) in zip(axes, panels, strict=True):
        rows = [results.rows[case.key] for case in cases]
        axis.set_title(f"batch {batch}", loc="left", fontsize="medium")
        axis.set_xscale("log")
        series = _contenders(rows)
        _draw(axis, [case.title for case in cases], series, _whole)
        _mark_back_to_back(axis, series)
    _widen(axes[-1], _LOG_ROOM)
    axes[-1].set_xlabel("time of a call, microseconds (logarithmic); the numbers are p50")
    _legend(figure, axes[0])
    return figure


def _timed(results: Results, batch: int) -> list[Case]:
    return [
        case
        for case in CASES
        if case.batch == batch
        and case.key in results.rows
        and results.rows[case.key].timing("eager") is not None
    ]


def _contenders(rows: Sequence[Row]) -> list[_Series]:
    """Return the medians of the contenders, with back-to-back calls as marks."""
    found = []
    for name, label in CONTENDERS.items():
        timings = [row.timing(name) for row in rows]
        lengths = [None if timing is None else timing.p50_us for timing in timings]
        marks = [None if timing is None else timing.pipelined_us for timing in timings]
        found.append(_Series(label, lengths, *_CONTENDER_STYLES[name], marks))
    return found


def target_figure(results: Results) -> Figure | None:
    """Draw medians, and ratios to ``torch.compile``, with what is to be reached as lines."""
    rows = [results.rows.get(target.case.key, Row()) for target in TARGETS]
    if not any(row.timing("ours") for row in rows):
        return None
    figure = Figure((1.35 * _WIDTH, _height(len(TARGETS), 2) + _MARGIN_HEIGHT))
    figure.set_layout_engine("constrained")
    times, ratios = figure.subplots(1, 2, sharey=True)
    titles = [target.case.title for target in TARGETS]
    times.set_xscale("log")
    _, compiled, ours = _contenders(rows)
    series = [
        attrs.evolve(compiled, marks=()),
        attrs.evolve(ours, marks=[target.p50_us for target in TARGETS]),
    ]
    _draw(times, titles, series, _whole)
    _mark_targets(times, series)
    _widen(times, _LOG_ROOM)
    times.set_xlabel("p50 of a call, microseconds (logarithmic)")
    _legend(figure, times, loc="outside upper left")
    series = [
        _Series(
            "p50",
            [row.ratio("p50_us") for row in rows],
            *_DARK,
            [target.p50_ratio for target in TARGETS],
        ),
        _Series(
            "back to back",
            [row.ratio("pipelined_us") for row in rows],
            *_WHITE,
            [target.pipelined_ratio for target in TARGETS],
        ),
    ]
    _draw(ratios, titles, series, ratio_text)
    _mark_targets(ratios, series)
    _widen(ratios, _ROOM)
    ratios.set_xlabel("time of torch.compile / time of aitune (longer is better)")
    _legend(figure, ratios, loc="outside upper right")
    return figure


def build_figure(results: Results) -> Figure | None:
    """Draw the seconds of building and starting at the batch size of the headline."""
    cases = _timed(results, HEADLINE_BATCH)
    if not cases:
        return None
    rows = [results.rows[case.key] for case in cases]
    figure, axis = _single(cases, bars=3)
    series = [
        _Series("tune", [row.build_seconds("ours") for row in rows], *_DARK),
        _Series("torch.compile", [row.build_seconds("compile") for row in rows], *_MIDDLE),
        _Series("load to first answer", [row.first_answer_seconds for row in rows], *_WHITE),
    ]
    _draw(axis, [case.title for case in cases], series, lambda value: f"{value:.1f}")
    _widen(axis, _ROOM)
    axis.set_xlabel(f"seconds, batch {HEADLINE_BATCH}")
    _legend(figure, axis)
    return figure


def memory_figure(results: Results) -> Figure | None:
    """Draw device memory at the batch size of the headline; None where there is no device."""
    cases, looks = [], []
    for case in _timed(results, HEADLINE_BATCH):
        memory = results.rows[case.key].memory
        if memory is not None:
            cases.append(case)
            looks.append(memory)
    if not cases:
        return None
    figure, axis = _single(cases, bars=4)
    series = [
        _Series("before", [memory.before / _GIB for memory in looks], *_LIGHT),
        _Series("peak in tuning", [memory.peak / _GIB for memory in looks], *_MIDDLE),
        _Series("after tuning", [memory.after_tuning / _GIB for memory in looks], *_DARK),
        _Series("after calls", [memory.after_calls / _GIB for memory in looks], *_WHITE),
    ]
    _draw(axis, [case.title for case in cases], series, lambda value: f"{value:.2f}")
    _widen(axis, _ROOM)
    axis.set_xlabel(f"device memory in use, GiB, batch {HEADLINE_BATCH}")
    _legend(figure, axis)
    return figure


def overhead_figure(overhead: Overhead) -> Figure | None:
    """Draw the medians of pytest-benchmark, one panel per group; None without any."""
    groups = list(dict.fromkeys(row.group for row in overhead.rows))
    if not groups:
        return None
    panels = [[row for row in overhead.rows if row.group == group] for group in groups]
    heights = [_height(len(rows), 1) for rows in panels]
    figure = Figure((_WIDTH, sum(heights) + len(panels) * 0.3 + _MARGIN_HEIGHT))
    figure.set_layout_engine("constrained")
    ratios = {"height_ratios": heights}
    axes = figure.subplots(len(panels), squeeze=False, sharex=True, gridspec_kw=ratios)[:, 0]
    for axis, group, rows in zip(axes, groups, panels, strict=True):
        axis.set_title(group or "others", loc="left", fontsize="medium")
        series = _Series("p50", [row.p50_us for row in rows], *_DARK)
        _draw(axis, [row.label for row in rows], [series], lambda value: f"{value:,.1f}")
        axis.set_xscale("log")
    _widen(axes[-1], _LOG_ROOM)
    axes[-1].set_xlabel("p50 of a call on the CPU, microseconds (logarithmic)")
    return figure


def _single(cases: Sequence[Case], *, bars: int) -> tuple[Figure, Axes]:
    figure = Figure((_WIDTH, _height(len(cases), bars) + _MARGIN_HEIGHT))
    figure.set_layout_engine("constrained")
    return figure, figure.subplots()


def _height(groups: int, bars: int) -> float:
    return groups * (bars * _BAR_HEIGHT + _GAP_HEIGHT)


def _draw(
    axis: Axes, titles: Sequence[str], series: Sequence[_Series], text: Callable[[float], str]
) -> None:
    """Draw groups of bars from top to bottom, a number behind each."""
    for position, bars in enumerate(series):
        shown = _shown(bars.lengths, position, len(series))
        axis.barh(
            [place for place, _ in shown],
            [length for _, length in shown],
            height=_FILLED / len(series),
            label=bars.label,
            color=bars.colour,
            hatch=bars.hatch,
            edgecolor="black",
            linewidth=0.6,
        )
        marks = dict(_shown(bars.marks, position, len(series)))
        for place, length in shown:
            end = max(length, marks.get(place, length))
            axis.annotate(
                text(length),
                (end, place),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                fontsize="small",
            )
    axis.set_yticks(range(len(titles)), titles)
    axis.set_ylim(len(titles) - 0.5, -0.5)
    axis.grid(axis="x", color="#cccccc", linewidth=0.5)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _shown(lengths: Sequence[float | None], position: int, of: int) -> list[tuple[float, float]]:
    """Return where the middles of a series' bars are, and their lengths."""
    return [
        (group + _FILLED * ((position + 0.5) / of - 0.5), length)
        for group, length in enumerate(lengths)
        if length is not None
    ]


def _mark_back_to_back(axis: Axes, series: Sequence[_Series]) -> None:
    marks = [
        mark
        for position, bars in enumerate(series)
        for mark in _shown(bars.marks, position, len(series))
    ]
    axis.plot(
        [length for _, length in marks],
        [place for place, _ in marks],
        linestyle="",
        marker="D",
        markersize=5,
        markerfacecolor="white",
        markeredgecolor="black",
        label="the same back to back",
    )


def _mark_targets(axis: Axes, series: Sequence[_Series]) -> None:
    """Draw marks as lines across the bars, with an edge that is seen on dark bars too."""
    half = _FILLED / len(series) / 2
    marks = [
        mark
        for position, bars in enumerate(series)
        for mark in _shown(bars.marks, position, len(series))
    ]
    axis.vlines(
        [length for _, length in marks],
        [place - half for place, _ in marks],
        [place + half for place, _ in marks],
        color="black",
        linewidth=2.5,
        path_effects=[withStroke(linewidth=5, foreground="white")],
        label="target",
    )


def _widen(axis: Axes, factor: float) -> None:
    """Leave room for the numbers; a logarithmic axis begins at a power of ten."""
    low, high = axis.get_xlim()
    if axis.get_xscale() == "log":
        low = 10.0 ** math.floor(math.log10(low))
    axis.set_xlim(low, high * factor)


def _legend(figure: Figure, axis: Axes, loc: str = "outside upper center") -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc=loc, ncols=len(labels), frameon=False)


def _whole(value: float) -> str:
    return f"{value:,.0f}"

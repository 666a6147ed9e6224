"""Charts of one graph of a report, as SVG that takes on the colours of the page."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import altair as alt
import attrs
import vl_convert  # noqa: F401 - altair imports it when it draws

from aitune_core._report import CandidateReport, GraphReport
from aitune_core._report_words import candidate_names
from aitune_core.results import Measurement

__all__ = ["Chart", "charts_of"]

#: Narrow, so that text stays readable where a phone shrinks it.
_WIDTH: Final = 340
_ROW_HEIGHT: Final = 30
_HEIGHT: Final = 180
_TEXT: Final = "currentColor"
_LINES: Final = "#8886"
#: Readable on white and on black, also for people who see few colours.
_COLOURS: Final = ("#888888", "#2f7fd1", "#d9742b", "#2e9c6e", "#b65fb5", "#b99a1c", "#3fa7b5")
_STEPS: Final = ("build", "check", "measure", "load")

_Rows = list[dict[str, Any]]


@attrs.frozen
class Chart:
    """One chart.

    Attributes:
        title: What it shows.
        caption: How to read it.
        svg: The drawing, with text as text.
    """

    title: str
    caption: str
    svg: str


def charts_of(graph: GraphReport, place: int) -> list[Chart]:
    """Return the charts for which a graph has figures.

    Args:
        graph: The graph.
        place: Number of the graph on the page.
    """
    named = list(zip(candidate_names(graph), graph.candidates, strict=True))
    numbers = itertools.count(100 * place)
    makers = (_latencies, _throughput, _errors, _seconds)
    return [
        attrs.evolve(chart, svg=_own_names(chart.svg, next(numbers)))
        for chart in (maker(graph, named) for maker in makers)
        if chart is not None
    ]


_Named = Sequence[tuple[str, CandidateReport]]


def _measured(graph: GraphReport, named: _Named) -> Iterator[tuple[str, Measurement]]:
    if graph.eager is not None:
        yield "eager", graph.eager
    for name, candidate in named:
        if candidate.measurement is not None:
            yield name, candidate.measurement


def _latencies(graph: GraphReport, named: _Named) -> Chart | None:
    measured = list(_measured(graph, named))
    calls: _Rows = [
        {"name": name, "ms": value} for name, each in measured for value in each.times_ms
    ]
    if not calls:
        return None
    marks: _Rows = [
        {"name": name, "p50": each.p50_ms, "p99": each.p99_ms} for name, each in measured
    ]
    names = [name for name, _ in measured]
    # A few slow calls would press all others into a line.
    most = 1.3 * max(each.p99_ms for _, each in measured)
    scale = alt.Scale(domain=(0, most), clamp=True, nice=True)
    ticks = alt.Chart(_data(calls)).mark_tick(opacity=0.25, thickness=1.5)
    spans = alt.Chart(_data(marks)).mark_rule(strokeWidth=2)
    middles = alt.Chart(_data(marks)).mark_point(filled=True, size=70, opacity=1)
    x = alt.X("ms:Q", title="milliseconds per call", scale=scale)
    drawing = (
        ticks.encode(x=x, y=_rows(names), color=_colours(graph, names))
        + spans.encode(x="p50:Q", x2="p99:Q", y=_rows(names), color=_colours(graph, names))
        + middles.encode(x="p50:Q", y=_rows(names), color=_colours(graph, names))
    )
    beyond = sum(call["ms"] > most for call in calls)
    sizes = {each.batch_size for _, each in measured}
    caption = [
        "One tick per timed call; the dot is the median, the line goes to the 99th percentile.",
        f"Slower calls, {beyond} of {len(calls)}, stand at the right end." if beyond else "",
        _batch_sizes(measured) if len(sizes) > 1 else "",
    ]
    return Chart(
        "Latency",
        " ".join(filter(None, caption)),
        _drawn(drawing, _ROW_HEIGHT * len(names)),
    )


def _batch_sizes(measured: Sequence[tuple[str, Measurement]]) -> str:
    """Say that calls hold different numbers of samples."""
    sizes = (f"{name} {each.batch_size or 'several'}" for name, each in measured)
    return f"Samples per call differ: {', '.join(sizes)}."


def _throughput(graph: GraphReport, named: _Named) -> Chart | None:
    measured = list(_measured(graph, named))
    points: _Rows = [
        {"name": name, "rows": point.batch_size, "rate": point.samples_per_second}
        for name, each in measured
        for point in each.batches
        if point.samples_per_second is not None
    ]
    if len({point["rows"] for point in points}) < 2:  # noqa: PLR2004 - a line has two ends
        return None
    names = [name for name, _ in measured]
    sizes = sorted({point["rows"] for point in points})
    drawing = (
        alt.Chart(_data(points))
        .mark_line(point=True)
        .encode(
            x=alt.X(
                "rows:Q",
                title="batch size",
                scale=alt.Scale(type="log", base=2),
                axis=alt.Axis(values=sizes, format="d", labelOverlap=True),
            ),
            y=alt.Y("rate:Q", title="samples per second", axis=alt.Axis(format="~s")),
            color=_colours(graph, names, legend=True),
        )
    )
    return Chart("Throughput", "More is better.", _drawn(drawing, _HEIGHT))


def _errors(graph: GraphReport, named: _Named) -> Chart | None:
    rows: _Rows = [
        {
            "name": name,
            "error": each.check.error,
            "allowed": each.check.allowed_error,
            "eager": each.check.eager_error,
        }
        for name, each in named
        if each.check is not None and each.check.allowed_error > 0
    ]
    if not rows:
        return None
    names = [row["name"] for row in rows]
    shown = [row[kind] for row in rows for kind in ("error", "allowed", "eager") if row[kind] > 0]
    lowest = min(shown) / 10
    for row in rows:
        row["error"] = max(row["error"], lowest)
    known: _Rows = [row for row in rows if row["eager"] > 0]
    highest = 3 * max(shown)
    scale = alt.Scale(type="log", domain=(lowest, highest))
    axis = _powers_of_ten(lowest, highest)
    data = _data(rows)
    bars = alt.Chart(data).mark_bar(height=12)
    allowed = alt.Chart(data).mark_tick(thickness=3, size=22, color="#c0392b")
    own = alt.Chart(_data(known)).mark_tick(thickness=3, size=22, color=_COLOURS[0])
    drawing = (
        bars.encode(
            x=alt.X("error:Q", title="relative error", scale=scale, axis=axis),
            x2=alt.datum(lowest),
            y=_rows(names),
            color=_colours(graph, names),
        )
        + allowed.encode(x=alt.X("allowed:Q", scale=scale), y=_rows(names))
        + own.encode(x=alt.X("eager:Q", scale=scale), y=_rows(names))
    )
    return Chart(
        "Error against tolerance",
        "The bar is the largest error on recorded calls, the grey mark that of eager itself, the "
        "red one what is allowed. The scale is logarithmic.",
        _drawn(drawing, _ROW_HEIGHT * len(names)),
    )


def _seconds(_: GraphReport, named: _Named) -> Chart | None:
    rows: _Rows = [
        {"name": name, "step": step, "seconds": seconds, "order": order}
        for name, each in named
        for order, step in enumerate(_STEPS)
        if (seconds := getattr(each.seconds, step))
    ]
    if not rows:
        return None
    names = [name for name, each in named if each.status != "not tried"]
    drawing = (
        alt.Chart(_data(rows))
        .mark_bar(height=14)
        .encode(
            x=alt.X("seconds:Q", title="seconds"),
            y=_rows(names),
            color=alt.Color(
                "step:N",
                scale=alt.Scale(domain=list(_STEPS), range=list(_COLOURS[1:5])),
                legend=_legend(),
            ),
            order=alt.Order("order:Q"),
        )
    )
    return Chart(
        "Time spent",
        "What each candidate took, by step.",
        _drawn(drawing, _ROW_HEIGHT * len(names)),
    )


def _data(rows: _Rows) -> alt.InlineData:
    return alt.InlineData(values=rows)


def _rows(names: Sequence[str]) -> alt.Y:
    axis = alt.Axis(labelLimit=150, labelPadding=6, ticks=False, domain=False)
    return alt.Y("name:N", title=None, sort=list(names), axis=axis)


def _colours(graph: GraphReport, names: Sequence[str], *, legend: bool = False) -> alt.Color:
    """Give an executable the same colour in every chart."""
    others = itertools.cycle(_COLOURS[1:])
    palette = {"eager": _COLOURS[0], **dict(zip(candidate_names(graph), others, strict=False))}
    scale = alt.Scale(domain=list(names), range=[palette[name] for name in names])
    return alt.Color("name:N", scale=scale, legend=_legend() if legend else None)


def _legend() -> alt.Legend:
    return alt.Legend(orient="bottom", title=None, columns=2, labelLimit=150)


def _powers_of_ten(low: float, high: float) -> alt.Axis:
    """Return an axis with few marks, each a power of ten."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    values = [10.0**power for power in range(first, last + 1, max(1, (last - first) // 4))]
    return alt.Axis(format=".0e", values=values)


def _drawn(drawing: Any, height: int) -> str:  # noqa: ANN401 - altair's charts share no type
    themed = (
        drawing.properties(width=_WIDTH, height=height, background="transparent")
        .configure_view(stroke=None)
        .configure_axis(
            labelColor=_TEXT,
            titleColor=_TEXT,
            gridColor=_LINES,
            domainColor=_LINES,
            tickColor=_LINES,
            labelFontSize=12,
            titleFontSize=12,
            titleFontWeight="normal",
        )
        .configure_legend(labelColor=_TEXT, labelFontSize=12)
    )
    text = io.StringIO()
    themed.save(text, format="svg")
    return text.getvalue()


def _own_names(svg: str, number: int) -> str:
    """Let the drawing fill its place, and its parts have names that no other drawing has."""
    svg = re.sub(r'(id="|url\(#)', rf"\g<1>chart{number}-", svg)
    return re.sub(r'<svg ([^>]*?)width="[\d.]+" height="[\d.]+"', r"<svg \1", svg, count=1)

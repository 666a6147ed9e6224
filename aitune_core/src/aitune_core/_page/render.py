"""The page of a report, from a template that escapes all text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import jinja2

from aitune_core._page.charts import charts_of
from aitune_core._report import CandidateReport, GraphReport, TuneRecord
from aitune_core._report_words import (
    bytes_in_words,
    candidate_names,
    error_in_words,
    ms_in_words,
    place_in_words,
    rate_in_words,
    readable,
    seconds_in_words,
    where_in_words,
)
from aitune_core.results import BatchPoint

__all__ = ["rendered"]


def rendered(report: TuneRecord) -> str:
    """Return a report as the text of an HTML file that needs nothing besides itself."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("aitune_core", "_page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bytes=bytes_in_words,
        error=error_in_words,
        ms=ms_in_words,
        rate=rate_in_words,
        readable=readable,
        seconds=seconds_in_words,
    )
    modules = []
    place = 0
    for module in report.modules:
        graphs = []
        for graph in module.graphs:
            graphs.append(_graph(graph, place))
            place += 1
        modules.append({"record": module, "graphs": graphs})
    return environment.get_template("report.html.jinja").render(
        report=report, where=where_in_words(report), modules=modules, facts=dict(_facts(report))
    )


def _graph(graph: GraphReport, place: int) -> dict[str, Any]:
    pairs = list(zip(candidate_names(graph), graph.candidates, strict=True))
    named = [
        {"name": name, "record": candidate, "place": place_in_words(candidate)}
        for name, candidate in pairs
    ]
    winners = [(name, candidate) for name, candidate in pairs if candidate.status == "won"]
    return {
        "record": graph,
        "winner": winners[0][0] if winners else "eager",
        "speed": _speed(winners[0][1]) if winners else "",
        "candidates": named,
        "batches": list(_batches(graph, pairs)),
        "charts": charts_of(graph, place),
    }


def _batches(
    graph: GraphReport, pairs: Sequence[tuple[str, CandidateReport]]
) -> Iterator[tuple[str, BatchPoint]]:
    """What was measured at each batch size, and at which it was not possible."""
    measured = [("eager", graph.eager), *((name, each.measurement) for name, each in pairs)]
    for name, measurement in measured:
        for point in () if measurement is None else measurement.batches:
            yield name, point


def _speed(candidate: CandidateReport) -> str:
    ratio = candidate.ratio
    if ratio is None:
        return ""
    return (
        f"{ratio.value:.2f} x the speed of eager "
        f"({ratio.low:.2f} to {ratio.high:.2f} at {100 * ratio.confidence:.0f} %)"
    )


def _facts(report: TuneRecord) -> Iterator[tuple[str, str]]:
    for name, value in attrs.asdict(report.environment).items():
        if name != "facts" and value:
            yield name.replace("_", " "), str(value)
    yield from report.environment.facts.items()

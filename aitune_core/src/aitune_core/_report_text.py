"""A report as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

from aitune_core._report import CandidateReport, GraphReport, ModuleReport, TuneRecord
from aitune_core._report_words import (
    candidate_names,
    differing_options,
    error_in_words,
    ms_in_words,
    place_in_words,
    rate_in_words,
    readable,
    seconds_in_words,
    where_in_words,
)
from aitune_core.results import Measurement

__all__ = ["report_summary"]

_WIDTH: Final = 100
#: How much of a line of an error is shown, in characters; the whole is in the report's JSON.
_LINE_LENGTH: Final = 300
_HEADINGS: Final = (
    *("candidate", "status", "p50 ms", "p90 ms", "p99 ms", "rows/s", "x eager", "error"),
    *("allowed", "build"),
)
_INDENT: Final = 4
_GAP: Final = "  "


def report_summary(report: TuneRecord) -> str:
    """Return a report as lines of at most 100 characters."""
    lines = list(_wrapped(where_in_words(report), 0))
    for module in report.modules:
        lines.extend(_module_lines(module))
    return "\n".join(lines)


def _module_lines(module: ModuleReport) -> Iterator[str]:
    yield from _wrapped(f"{module.name} ({module.strategy})", 0)
    for note in module.notes:
        yield from _wrapped(f"note: {note}", 2)
    for graph in module.graphs:
        yield from _graph_lines(graph)


def _graph_lines(graph: GraphReport) -> Iterator[str]:
    dims = f", dims {', '.join(graph.dims)}" if graph.dims else ""
    calls = "1 call" if graph.samples == 1 else f"{graph.samples} calls"
    yield from _wrapped(f"{graph.name}: {calls}{dims}", 2)
    for text in (
        *graph.inputs,
        *(f"fixed: {constant}" for constant in graph.constants),
        *(f"only sizes with {condition}" for condition in graph.conditions),
    ):
        yield from _wrapped(text, 4)
    names = candidate_names(graph)
    if graph.candidates:
        yield from _table(graph, names)
    if graph.reason:
        yield from _wrapped(f"-> {graph.winner or 'eager'}: {_first_line(graph.reason)}", 4)
    for name, candidate in zip(names, graph.candidates, strict=True):
        options = differing_options(graph, candidate)
        if options and options not in name:
            yield from _wrapped(f"{name}: with {options}", 4)
        yield from _sentences(name, candidate)


def _table(graph: GraphReport, names: Sequence[str]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [_HEADINGS]
    if graph.eager is not None:
        status = "won" if graph.winner is None else ""
        rows.append(("eager", status, *_latencies(graph.eager), "", "", "", ""))
    rows.extend(_row(*each) for each in zip(names, graph.candidates, strict=True))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # Names give way: numbers are of no use without all their digits.
    widths[0] = min(widths[0], _WIDTH - _INDENT - sum(len(_GAP) + width for width in widths[1:]))
    for row in rows:
        left = [
            _cut(cell, width).ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)
        ]
        right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        yield f"{' ' * _INDENT}{_GAP.join((*left, *right))}".rstrip()


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _row(name: str, candidate: CandidateReport) -> tuple[str, ...]:
    check, ratio = candidate.check, candidate.ratio
    return (
        name,
        candidate.status,
        *_latencies(candidate.measurement),
        "" if ratio is None else f"{ratio.value:.2f}",
        "" if check is None else error_in_words(check.error),
        "" if check is None else error_in_words(check.allowed_error),
        "" if candidate.status == "not tried" else seconds_in_words(candidate.seconds.build),
    )


def _latencies(measurement: Measurement | None) -> tuple[str, ...]:
    if measurement is None:
        return ("", "", "", "")
    milliseconds = (measurement.p50_ms, measurement.p90_ms, measurement.p99_ms)
    return (*map(ms_in_words, milliseconds), rate_in_words(measurement.samples_per_second))


def _sentences(name: str, candidate: CandidateReport) -> Iterator[str]:
    """What became of a candidate, why, and the ways of building that it tried."""
    if candidate.check is not None:
        check = f"{name}: {candidate.check.cases} checks passed"
        place = place_in_words(candidate)
        yield from _wrapped(f"{check}, at most {place}" if place else check, 4)
    # Where attempts are listed, the error of a failure only gathers them; the decision is above.
    listed = candidate.status == "failed" and not all(
        attempt.succeeded for attempt in candidate.attempts
    )
    if listed:
        yield from _wrapped(f"{name}: failed", 4)
    elif candidate.status != "won":
        yield from _wrapped(f"{name}: {candidate.status}: {_first_line(candidate.reason)}", 4)
    for attempt in candidate.attempts:
        detail = f": {_first_line(attempt.detail)}" if attempt.detail else ""
        yield from _wrapped(f"{'ok' if attempt.succeeded else 'no'}: {attempt.step}{detail}", 6)


def _first_line(text: str) -> str:
    return _cut(text.strip().partition("\n")[0], _LINE_LENGTH)


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        readable(text).replace("\n", " "),
        _WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        break_on_hyphens=False,
    )

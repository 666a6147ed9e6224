"""The tables of the page, as cells; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import attrs

from benchmarks.overhead import Overhead, OverheadRow
from benchmarks.plan import CASES, CONTENDERS, TARGETS, Case
from benchmarks.results import Memory, Results, Row

__all__ = [
    "Table",
    "build_table",
    "environment_table",
    "latency_table",
    "memory_table",
    "overhead_tables",
    "problems",
    "ratio_text",
    "target_table",
]

#: In a cell that has no figure; the list of problems says why.
_NONE: Final = "-"
_MIB: Final = 2**20


@attrs.frozen
class Table:
    """Header and rows, all of the same length."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        """Return the table in Markdown."""
        lines = [self.header, ("---",) * len(self.header), *self.rows]
        return "\n".join(
            f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines
        )


def environment_table(results: Results) -> Table:
    """Return hardware and versions."""
    return Table(("what", "which"), tuple(results.environment.items()))


def target_table(results: Results) -> Table:
    """Return what is to be reached, what was, and whether that is enough.

    Figures are rounded to the side that is worse for us.
    """
    rows = []
    for target in TARGETS:
        row = results.rows.get(target.case.key, Row())
        ours = row.timing("ours")
        p50 = None if ours is None else ours.p50_us
        rows.append(
            (
                target.case.title,
                _at_most(p50, target.p50_us),
                _at_least(row.ratio("p50_us"), target.p50_ratio),
                _at_least(row.ratio("pipelined_us"), target.pipelined_ratio),
                _at_most(p50, target.stretch_us),
            )
        )
    header = (
        *("model", "p50 us"),
        *("torch.compile p50 / aitune p50", "torch.compile pipelined / aitune pipelined"),
        "p50 us, later target",
    )
    return Table(header, tuple(rows))


def _at_most(value: float | None, limit: float | None) -> str:
    if limit is None:
        return _NONE
    if value is None:
        return f"not measured (<= {_us(limit)})"
    verdict = "met" if value <= limit else "missed"
    shown = f"{math.ceil(10 * value) / 10:,.1f}" if limit < 100 else f"{math.ceil(value):,}"  # noqa: PLR2004
    return f"{shown}: **{verdict}** (<= {_us(limit)})"


def _at_least(value: float | None, limit: float | None) -> str:
    if limit is None:
        return _NONE
    if value is None:
        return f"not measured (>= {limit:.2f})"
    verdict = "met" if value >= limit else "missed"
    return f"{_ratio(value)}: **{verdict}** (>= {limit:.2f})"


def _us(value: float) -> str:
    return f"{value:,.1f}" if value < 100 and value % 1 else f"{value:,.0f}"  # noqa: PLR2004


def ratio_text(value: float) -> str:
    """Return a ratio in words, rounded down."""
    return f"{math.floor(100 * value) / 100:.2f}"


def _ratio(value: float | None) -> str:
    return _NONE if value is None else ratio_text(value)


def latency_table(results: Results) -> Table:
    """Return the times of every row, those that were not run as well."""
    header = (
        *("model", "batch"),
        *CONTENDERS.values(),
        *("p50 ratio", "pipelined ratio"),
        *("difference, aitune", "difference, torch.compile"),
    )
    return Table(header, tuple(_latencies(case, results.rows.get(case.key)) for case in CASES))


def _latencies(case: Case, row: Row | None) -> tuple[str, ...]:
    if row is None:
        return (case.title, str(case.batch), *(["not run"] * len(CONTENDERS)), *([_NONE] * 4))
    return (
        *(case.title, str(case.batch)),
        *(_times(row, contender) for contender in CONTENDERS),
        *(_ratio(row.ratio("p50_us")), _ratio(row.ratio("pipelined_us"))),
        *(_difference(row, "ours"), _difference(row, "compile")),
    )


def _times(row: Row, contender: str) -> str:
    timing = row.timing(contender)
    if timing is None:
        found = row.contenders.get(contender)
        reason = row.problem if found is None else found.problem
        return "left out" if reason is not None and reason.startswith("left out") else "error"
    return " / ".join(_us(time) for time in (timing.p50_us, timing.p90_us, timing.pipelined_us))


def _difference(row: Row, contender: str) -> str:
    found = row.contenders.get(contender)
    if found is None or found.max_difference is None or found.allowed_difference is None:
        return _NONE
    return f"{found.max_difference:.2g} of {found.allowed_difference:.2g}"


def build_table(results: Results) -> Table:
    """Return seconds of building and of starting, for the rows that were run."""
    rows = tuple(
        (
            *(case.title, str(case.batch)),
            *(_seconds(row.build_seconds(name)) for name in ("ours", "compile")),
            _seconds(row.first_answer_seconds),
        )
        for case, row in _run(results)
    )
    header = ("model", "batch", "tune s", "torch.compile s", "load to first answer s")
    return Table(header, rows)


def _run(results: Results) -> list[tuple[Case, Row]]:
    """Return the cases that were run."""
    return [(case, results.rows[case.key]) for case in CASES if case.key in results.rows]


def _seconds(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1f}"


def memory_table(results: Results) -> Table | None:
    """Return device memory, for the rows that were run; None where there is no device."""
    rows = tuple(
        (case.title, str(case.batch), *(_mib(each) for each in _looks(row.memory)))
        for case, row in _run(results)
        if row.memory is not None
    )
    header = (
        *("model", "batch", "before MiB", "peak in tuning MiB"),
        *("after tuning MiB", "after calls MiB"),
    )
    return Table(header, rows) if rows else None


def _looks(memory: Memory) -> tuple[int, ...]:
    return memory.before, memory.peak, memory.after_tuning, memory.after_calls


def _mib(value: int) -> str:
    return f"{value / _MIB:,.0f}"


def overhead_tables(overhead: Overhead) -> dict[str, Table]:
    """Return one table per group of benchmarks, by the group's name."""
    groups = dict.fromkeys(row.group for row in overhead.rows)
    return {
        group or "others": _overhead_table([row for row in overhead.rows if row.group == group])
        for group in groups
    }


def _overhead_table(rows: Sequence[OverheadRow]) -> Table:
    """Return a table with a column for each fact that some row has."""
    facts = tuple(dict.fromkeys(name for row in rows for name in row.facts))
    return Table(
        ("call", "p50 us", *facts),
        tuple(
            (row.name, f"{row.p50_us:,.2f}", *(row.facts.get(fact, "") for fact in facts))
            for row in rows
        ),
    )


def problems(results: Results) -> list[str]:
    """Return what went wrong or was left out in the rows that were run, one line each."""
    return [
        f"{case.title}, batch {case.batch}: {problem}"
        for case, row in _run(results)
        for problem in row.problems()
    ]

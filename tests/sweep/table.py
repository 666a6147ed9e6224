"""The table of the sweep, for a terminal and for docs/support.md."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from .outcome import SHARE, Outcome

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "support.md"
COMMAND: Final = "AITUNE_SWEEP_WRITE=1 python3 -m nox -s sweep"

_PACKAGES: Final = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")
_HEADINGS: Final = ("family", "dynamic dims", "exporter", "result", "worst difference", "build s")
_RIGHT: Final = (False, False, False, False, True, True)
_REASON_LENGTH: Final = 400


def terminal_table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of the table, in columns, with the reasons below it."""
    rows = [_HEADINGS, *map(_cells, outcomes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, _RIGHT, strict=True)
        ).rstrip()
        for row in rows
    ]
    for outcome in outcomes:
        lines += [f"{outcome.family.name}: no: {attempt}" for attempt in outcome.attempts]
        if outcome.reason and not outcome.attempts:
            lines.append(f"{outcome.family.name}: {outcome.reason}")
        if outcome.result == "some sizes":
            lines.append(f"{outcome.family.name}: {_sizes(outcome)}")
        if outcome.failure:
            lines.append(f"{outcome.family.name}: WRONG: {outcome.failure}")
    return [*lines, _total(outcomes)]


def document(outcomes: Sequence[Outcome]) -> str:
    """Return the text of docs/support.md."""
    text = ["# What tunes", "", _introduction(), "", f"{_total(outcomes)}. {_origin()}"]
    for group, members in _grouped(outcomes):
        text += ["", f"## {group}", "", _line(_HEADINGS), _line(_rule(right) for right in _RIGHT)]
        text += [_line(_cells(outcome)) for outcome in members]
        remarks = {outcome.family.name: _remark(outcome) for outcome in members}
        if any(remarks.values()):
            text += ["", *(f"- {name}: {remark}" for name, remark in remarks.items() if remark)]
    return "\n".join(text) + "\n"


def _introduction() -> str:
    lines = (
        "Each family below was built small with random weights, tuned with the ONNX Runtime",
        "backend on the CPU over the dims given, and then compared with eager PyTorch on three",
        "calls of sizes that were not recorded, in which only the engine could answer. An",
        f"element may be off by {SHARE:g} of its own size plus the root mean square of its tensor;",
        "the worst difference is absolute, over these calls and those that tuning checks. *eager*",
        "means that tuning refused the family and said why: its calls go on running in PyTorch.",
        "*some sizes* means that its code does something else at the others, which run in PyTorch.",
    )
    return "\n".join(lines)


def _origin() -> str:
    return f"Written by\n`{COMMAND}` with {_versions()}."


def _cells(outcome: Outcome) -> tuple[str, ...]:
    family = outcome.family
    columns = zip(family.dims, zip(*family.recorded, strict=True), strict=True)
    return (
        family.name,
        ", ".join(f"{name} {min(sizes)}-{max(sizes)}" for name, sizes in columns),
        outcome.exporter or "-",
        outcome.result,
        "-" if outcome.worst is None else f"{outcome.worst:.1e}",
        f"{outcome.build_seconds:.1f}",
    )


def _rule(right: bool) -> str:
    return "--:" if right else ":--"


def _line(cells: Iterator[str] | Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _grouped(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[Outcome]]]:
    for group in dict.fromkeys(outcome.family.group for outcome in outcomes):
        yield group, [outcome for outcome in outcomes if outcome.family.group == group]


def _remark(outcome: Outcome) -> str:
    if outcome.result == "some sizes":
        return _sizes(outcome)
    return _short(outcome) if outcome.reason else ""


def _sizes(outcome: Outcome) -> str:
    return f"sizes with {' and '.join(f'`{text}`' for text in outcome.conditions)}"


def _short(outcome: Outcome) -> str:
    """Return the first attempt's failure on one line, else the reason."""
    text = " ".join((*outcome.attempts, outcome.reason)[0].split())
    return text if len(text) <= _REASON_LENGTH else f"{text[:_REASON_LENGTH]}..."


def _total(outcomes: Sequence[Outcome]) -> str:
    engines = sum(outcome.result in {"engine", "some sizes"} for outcome in outcomes)
    return f"{engines} of {len(outcomes)} families run on an engine"


def _versions() -> str:
    parts = [f"Python {platform.python_version()}"]
    return ", ".join([*parts, *(f"{name} {_version(name)}" for name in _PACKAGES)])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return version(f"{package}-gpu")

"""Names and numbers of a report in words, for text and page alike."""

from __future__ import annotations

import json
import math
from typing import Final

from aitune_core._report import CandidateReport, GraphReport, TuneRecord

__all__ = [
    "bytes_in_words",
    "candidate_names",
    "differing_options",
    "error_in_words",
    "ms_in_words",
    "place_in_words",
    "rate_in_words",
    "readable",
    "seconds_in_words",
    "where_in_words",
]

#: In characters.
_NAME_LENGTH: Final = 28


def readable(text: str) -> str:
    """Return a text without what terminals take for commands."""
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)


def candidate_names(graph: GraphReport) -> list[str]:
    """Return a name for each candidate, with the options by which those of one backend differ.

    Where such a name is long or does not tell them apart, they have numbers instead.
    """
    names = [readable(candidate.backend) for candidate in graph.candidates]
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    for name, same in places.items():
        options = [differing_options(graph, graph.candidates[place]) for place in same]
        full = [f"{name} ({words})" if words else name for words in options]
        if len(same) > 1 and (len(set(full)) < len(same) or max(map(len, full)) > _NAME_LENGTH):
            full = [f"{name} #{number}" for number in range(1, len(same) + 1)]
        for place, text in zip(same, full, strict=True):
            names[place] = text
    return names


def differing_options(graph: GraphReport, candidate: CandidateReport) -> str:
    """Return the options of a candidate that others of its backend have otherwise."""
    same = [other.options for other in graph.candidates if other.backend == candidate.backend]
    return ", ".join(
        readable(f"{option}={_short(value)}")
        for option, value in candidate.options.items()
        if value is not None and any(other.get(option) != value for other in same)
    )


def _short(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def where_in_words(report: TuneRecord) -> str:
    """Return where and how long a tuning ran."""
    facts = [report.environment.device_name, f"torch {report.environment.torch}"]
    facts.append(f"Python {report.environment.python}")
    did = "recorded" if report.dry_run else "tuned"
    return (
        f"{did} on {report.device} in {seconds_in_words(report.seconds)} "
        f"({', '.join(fact for fact in facts if fact)})"
    )


def ms_in_words(value: float | None) -> str:
    """Return milliseconds with about four digits; empty where there are none."""
    return "" if value is None else _four_digits(value)


def rate_in_words(value: float | None) -> str:
    """Return a number per second; empty where there is none."""
    return "" if not value else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004


def seconds_in_words(value: float | None) -> str:
    """Return a time in seconds; empty where there is none."""
    return "" if value is None else f"{value:.1f} s" if value >= 1 else f"{1e3 * value:.0f} ms"


def bytes_in_words(value: int | None) -> str:
    """Return memory in MiB or GiB; empty where it is not known."""
    if value is None:
        return ""
    gib = value / 2**30
    return f"{gib:.2f} GiB" if gib >= 1 else f"{value / 2**20:.1f} MiB"


def error_in_words(value: float | None) -> str:
    """Return a relative error; empty where there is none."""
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"


def place_in_words(candidate: CandidateReport) -> str:
    """Return where the numeric check found most of what is allowed used up; empty if nowhere."""
    check = candidate.check
    if check is None or check.tolerance_share == 0:
        return ""
    index = f" at {list(check.worst_index)}" if check.worst_index else ""
    case = f" on {check.worst_case}" if check.worst_case else ""
    return (
        f"{math.ceil(100 * check.tolerance_share)} % of what may differ, in "
        f"{readable(check.worst_output)}{index}{case}"
    )


def _four_digits(value: float) -> str:
    if value >= 1000:  # noqa: PLR2004
        return f"{value:,.0f}"
    digits = 3 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{min(max(digits, 0), 4)}f}"

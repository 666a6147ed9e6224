"""What pytest-benchmark measured, as rows; imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

import attrs

from benchmarks.results import ResultsError

__all__ = ["Overhead", "OverheadRow", "read_overhead"]


@attrs.frozen(kw_only=True)
class OverheadRow:
    """One benchmark.

    Attributes:
        group: What it belongs to; empty where it has no group.
        name: What it measures.
        p50_us: Median, microseconds.
        facts: What it says of itself, such as a number of tensors.
    """

    group: str
    name: str
    p50_us: float
    facts: dict[str, str]

    @property
    def label(self) -> str:
        """Name and facts in one line, such as ``"flat call, tensors 4"``."""
        if not self.facts:
            return self.name
        base = self.name.partition(" [")[0]
        facts = (fact if name == "what" else f"{name} {fact}" for name, fact in self.facts.items())
        return ", ".join([base, *facts])


@attrs.frozen(kw_only=True)
class Overhead:
    """All of one file.

    Attributes:
        machine: Processor and Python.
        date: Day of the run.
        rows: By file and name.
    """

    machine: str
    date: str
    rows: tuple[OverheadRow, ...]


def read_overhead(path: Path) -> Overhead:
    """Read what ``pytest --benchmark-json`` wrote.

    Raises:
        ResultsError: It is no such file.
        FileNotFoundError: There is none.
    """
    try:
        content = json.loads(path.read_text())
        machine = content["machine_info"]
        cpu = machine["cpu"]
        return Overhead(
            machine=f"{cpu.get('brand_raw') or machine['machine']}, {cpu['count']} cores, "
            f"Python {machine['python_version']}",
            date=content["datetime"][:10],
            rows=tuple(
                OverheadRow(
                    group=entry["group"] or "",
                    name=_title(entry["name"]),
                    p50_us=entry["stats"]["median"] * 1e6,
                    facts={name: str(fact) for name, fact in entry["extra_info"].items()},
                )
                for entry in sorted(content["benchmarks"], key=lambda entry: entry["fullname"])
            ),
        )
    except (ValueError, KeyError, TypeError) as error:
        msg = (
            f"{path} is no file of pytest-benchmark ({type(error).__name__}: {error}); expected "
            "one that `pytest --benchmark-json` wrote"
        )
        raise ResultsError(msg) from error


def _title(name: str) -> str:
    """Return the name of a test in words: ``"flat call [4]"`` for ``"test_flat_call[4]"``."""
    return name.removeprefix("test_").replace("_", " ").replace("[", " [")

"""The file of results: rows as they were measured, added to by later runs; imports no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final, TypeVar

import attrs
import cattrs

from benchmarks.plan import CONTENDERS

__all__ = [
    "Contender",
    "Memory",
    "Results",
    "ResultsError",
    "Row",
    "Run",
    "Timing",
    "read_results",
    "read_row",
    "write_atomically",
]

_T = TypeVar("_T")
_CONVERTER: Final = cattrs.Converter(forbid_extra_keys=True)


class ResultsError(ValueError):
    """A file of results cannot be read, or cannot be added to."""


@attrs.frozen(kw_only=True)
class Timing:
    """Times of a call, in microseconds; see `benchmarks.timing`."""

    p50_us: float
    p90_us: float
    pipelined_us: float
    calls: int


@attrs.frozen(kw_only=True)
class Contender:
    """One way to run the model of a row.

    Attributes:
        timing: None where there is a problem.
        problem: Why there is no timing, in words.
        build_seconds: Time until it could be called at full speed.
        max_difference: Largest absolute difference from eager's result, in the output that
            comes closest to what is allowed.
        allowed_difference: What is allowed for that output.
    """

    timing: Timing | None = None
    problem: str | None = None
    build_seconds: float | None = None
    max_difference: float | None = None
    allowed_difference: float | None = None


@attrs.frozen(kw_only=True)
class Memory:
    """Bytes of device memory in use, around the tuning of one module.

    Attributes:
        before: The model is on the device and was called.
        peak: Most that was seen during `tune`.
        after_tuning: When `tune` had returned.
        after_calls: After further calls of the tuned module.
    """

    before: int
    peak: int
    after_tuning: int
    after_calls: int


@attrs.frozen(kw_only=True)
class Row:
    """What became of one case.

    Attributes:
        contenders: By the keys of `benchmarks.plan.CONTENDERS`.
        memory: None on a CPU, and where it was not reached.
        first_answer_seconds: From `aitune_core.load` to the first result, in a new process.
        problem: Why the row is not whole, in words.
    """

    contenders: dict[str, Contender] = attrs.Factory(dict)
    memory: Memory | None = None
    first_answer_seconds: float | None = None
    problem: str | None = None

    def timing(self, contender: str) -> Timing | None:
        """Return the times of a contender; None where there are none."""
        found = self.contenders.get(contender)
        return None if found is None else found.timing

    def build_seconds(self, contender: str) -> float | None:
        """Return how long a contender was built; None where it was not."""
        found = self.contenders.get(contender)
        return None if found is None else found.build_seconds

    def ratio(self, times: str) -> float | None:
        """Return a time of ``torch.compile`` divided by ours; None where one is missing.

        Args:
            times: ``"p50_us"`` or ``"pipelined_us"``.
        """
        compiled, ours = self.timing("compile"), self.timing("ours")
        if compiled is None or ours is None:
            return None
        return float(getattr(compiled, times) / getattr(ours, times))

    def settled(self, *, compiles: bool) -> bool:
        """Return whether the row has all that measuring it again could give.

        Args:
            compiles: Whether ``torch.compile`` would be measured.
        """
        wanted = ("eager", "ours", "compile") if compiles else ("eager", "ours")
        return self.problem is None and all(self.timing(name) is not None for name in wanted)

    def problems(self) -> list[str]:
        """Return what went wrong or was left out, in words."""
        found = [] if self.problem is None else [self.problem]
        return found + [
            f"{CONTENDERS[name]}: {contender.problem}"
            for name, contender in self.contenders.items()
            if contender.problem is not None
        ]

    def to_json(self) -> str:
        """Return the row as JSON text; `read_row` reads it."""
        return json.dumps(_CONVERTER.unstructure(self), indent=1)


@attrs.frozen(kw_only=True)
class Run:
    """One start of the tool."""

    date: str
    command: str


@attrs.frozen(kw_only=True)
class Results:
    """Every row so far, all of one environment.

    Attributes:
        environment: Hardware and versions, by what they are.
        small: Whether models and settings are those of a trial.
        runs: The starts that gave the rows.
        rows: By `benchmarks.plan.Case.key`.
    """

    environment: dict[str, str]
    small: bool
    runs: tuple[Run, ...] = ()
    rows: dict[str, Row] = attrs.Factory(dict)

    @property
    def judged(self) -> bool:
        """Whether targets apply: they are for the whole models on a CUDA device."""
        return "CUDA" in self.environment and not self.small

    def with_row(self, key: str, row: Row) -> Results:
        """Return these results with one row more, or another in its place."""
        return attrs.evolve(self, rows={**self.rows, key: row})

    def with_run(self, run: Run, environment: dict[str, str], *, small: bool) -> Results:
        """Return these results with one start more.

        Raises:
            ResultsError: It is in another environment, so that its rows cannot stand beside these.
        """
        theirs, ours = {**self.environment, "small": str(self.small)}, {**environment}
        ours["small"] = str(small)
        for name in sorted(theirs.keys() | ours.keys()):
            if theirs.get(name) != ours.get(name):
                msg = (
                    f"the file holds results of {name} = {theirs.get(name)!r}, this run has "
                    f"{ours.get(name)!r}; rows of one file are from one environment: name another "
                    "file with --out"
                )
                raise ResultsError(msg)
        return attrs.evolve(self, runs=(*self.runs, run))

    def write(self, path: Path) -> None:
        """Write all, so that a reader sees the file as it was or as it is to be."""
        write_atomically(path, json.dumps(_CONVERTER.unstructure(self), indent=1) + "\n")


def read_results(path: Path) -> Results:
    """Read a file that `Results.write` wrote.

    Raises:
        ResultsError: It is no such file.
        FileNotFoundError: There is none.
    """
    return _read(path, Results)


def read_row(path: Path) -> Row:
    """Read a file with the text of `Row.to_json`.

    Raises:
        ResultsError: It is no such file.
        FileNotFoundError: There is none.
    """
    return _read(path, Row)


def _read(path: Path, kind: type[_T]) -> _T:
    try:
        content = json.loads(path.read_text())
        # cattrs does not look, and fails with an error of its own code.
        if not isinstance(content, dict):
            msg = f"holds a {type(content).__name__}"
            raise ValueError(msg)  # noqa: TRY004, TRY301 - the file is wrong, no argument
        return _CONVERTER.structure(content, kind)
    except (ValueError, cattrs.BaseValidationError) as error:
        reasons = cattrs.transform_error(error) if isinstance(error, ExceptionGroup) else [error]
        msg = (
            f"{path} is no file of results ({reasons[0]}); expected one that benchmarks.run wrote: "
            "name another, or remove it and measure again"
        )
        raise ResultsError(msg) from error


def write_atomically(path: Path, text: str) -> None:
    """Write a file under another name first, then rename it; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    unfinished.write_text(text)
    unfinished.replace(path)

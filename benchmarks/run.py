"""Measure rows, each in a process of its own, and add them to a file of results.

``python -m benchmarks.run --models mlp,bert --batches 8 --out results.json --seconds-limit 540``

Rows that the file holds already are not measured again, so that a later run goes on where one
ended.
"""

from __future__ import annotations

import argparse
import datetime as dt
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import attrs
import torch

from benchmarks.environment import environment
from benchmarks.options import case_arguments
from benchmarks.plan import BATCHES, TITLES, Case, chosen_cases
from benchmarks.results import Results, ResultsError, Row, Run, read_results, read_row

__all__ = ["main"]

#: Exit status where all was measured, but not every row has a figure of ours.
_ROWS_FAILED: Final = 3
#: Seconds of the limit that must be left for a row to be started.
_ROW_SECONDS: Final = 45
#: Time per kind of call and contender.
_SECONDS: Final = 0.75
_SMALL_SECONDS: Final = 0.05
#: Where compilers keep what they made; a row starts with these folders empty.
_CACHES: Final = ("AITUNE_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def main() -> None:
    """Measure what is asked for and missing; exits with 3 where a row has no figure of ours."""
    options = _options()
    end = time.monotonic() + options.seconds_limit
    here = environment(options.device)
    run = Run(
        date=dt.datetime.now(dt.UTC).date().isoformat(),
        command=shlex.join(["python", "-m", "benchmarks.run", *sys.argv[1:]]),
    )
    results = Results(environment=here, small=options.small)
    try:
        if options.out.exists():
            results = read_results(options.out)
        results = results.with_run(run, here, small=options.small)
    except ResultsError as error:
        sys.exit(str(error))
    failed = False
    for case in chosen_cases(options.models, options.batches):
        known = results.rows.get(case.key)
        if known is not None and known.settled(compiles=not options.no_compile):
            print(f"{case.key}: in the file already", flush=True)
            continue
        start = time.monotonic()
        if end - start < _ROW_SECONDS:
            print(f"{case.key}: not run, {end - start:.0f} s of the limit are left", flush=True)
            continue
        row = _measured(case, options, end - start)
        # What another run found is worth more than that this one was cut off.
        if row.contenders or known is None or not known.contenders:
            results = results.with_row(case.key, row)
            results.write(options.out)
        failed = failed or row.timing("ours") is None
        print(f"{case.key}, {time.monotonic() - start:.0f} s: {_summary(row)}", flush=True)
    sys.exit(_ROWS_FAILED if failed else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Measure rows.")
    parser.add_argument("--models", type=_models, default=list(TITLES), help=",".join(TITLES))
    parser.add_argument(
        "--batches", type=_batches, default=list(BATCHES), help=",".join(map(str, BATCHES))
    )
    parser.add_argument("--out", type=Path, required=True, help="file of results, to be added to")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--seconds-limit", type=float, default=math.inf, help="for all rows")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--small", action="store_true", help="tiny models, to try this tool")
    return parser.parse_args()


def _models(text: str) -> list[str]:
    chosen = text.split(",")
    for name in chosen:
        if name not in TITLES:
            msg = f"{name!r} is none of {', '.join(TITLES)}"
            raise argparse.ArgumentTypeError(msg)
    return chosen


def _batches(text: str) -> list[int]:
    for part in text.split(","):
        if part not in map(str, BATCHES):
            msg = f"{part!r} is none of {', '.join(map(str, BATCHES))}"
            raise argparse.ArgumentTypeError(msg)
    return [int(part) for part in text.split(",")]


def _measured(case: Case, options: argparse.Namespace, left: float) -> Row:
    """Measure a row in a new process, which writes what it has before it compiles."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        out, log = Path(folder, "row.json"), Path(folder, "log.txt")
        command = [
            *(sys.executable, "-m", "benchmarks.row"),
            *case_arguments(case, options.device, small=options.small),
            *("--out", str(out), "--seconds-left", str(left)),
            *("--seconds", str(_SMALL_SECONDS if options.small else _SECONDS)),
            *(["--no-compile"] if options.no_compile else []),
        ]
        caches = {name: str(Path(folder, name)) for name in _CACHES}
        problem = None
        # A file, no pipe: processes of the compiler outlive the row and would keep a pipe open.
        with log.open("w") as file:
            try:
                subprocess.run(
                    command,
                    check=True,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **caches},
                    timeout=None if math.isinf(left) else left,
                )
            except subprocess.TimeoutExpired:
                problem = f"cut off by the limit on time, after {left:.0f} s"
            except subprocess.CalledProcessError as error:
                lines = log.read_text(errors="replace").strip().splitlines()
                problem = f"exit status {error.returncode}: {' '.join(lines[-1:])}"
                print("\n".join(lines[-20:]), file=sys.stderr, flush=True)
        if not out.exists():
            return Row(problem=problem or f"{case.key} wrote no row")
        row = read_row(out)
        return row if problem is None else attrs.evolve(row, problem=problem)


def _summary(row: Row) -> str:
    """Return the times of a row and its problems in short."""
    times = [
        f"{name} {timing.p50_us:,.0f} / {timing.pipelined_us:,.0f} us"
        for name in row.contenders
        if (timing := row.timing(name)) is not None
    ]
    return "; ".join([*times, *row.problems()])


if __name__ == "__main__":
    main()

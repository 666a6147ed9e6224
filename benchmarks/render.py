"""Write the page and its pictures from files of results.

``python -m benchmarks.render results.json cpu-overhead.json --docs docs``

Needs matplotlib, and neither torch nor a GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.figures import (
    build_figure,
    latency_figure,
    memory_figure,
    overhead_figure,
    target_figure,
)
from benchmarks.overhead import Overhead, read_overhead
from benchmarks.page import page
from benchmarks.results import Results, ResultsError, read_results, write_atomically

__all__ = ["main", "write_page"]


def write_page(results: Results | None, overhead: Overhead | None, docs: Path) -> list[Path]:
    """Write ``benchmarks.md`` and its pictures; removes pictures that it does not show.

    Args:
        results: Rows of models, or None.
        overhead: Costs of calls on the CPU, or None.
        docs: Folder; made where it is missing.

    Returns:
        The files.
    """
    docs.mkdir(parents=True, exist_ok=True)
    for old in docs.glob("benchmarks-*.png"):
        old.unlink()
    written = []
    for name, figure in _figures(results, overhead).items():
        if figure is not None:
            written.append(docs / f"benchmarks-{name}.png")
            figure.savefig(written[-1], dpi=130)
    text = page(results, overhead, [picture.name for picture in written])
    write_atomically(docs / "benchmarks.md", text)
    return [docs / "benchmarks.md", *written]


def _figures(results: Results | None, overhead: Overhead | None) -> dict[str, Figure | None]:
    found: dict[str, Figure | None] = {}
    if results is not None:
        found["targets"] = target_figure(results) if results.judged else None
        found["latency"] = latency_figure(results)
        found["build"] = build_figure(results)
        found["memory"] = memory_figure(results)
    if overhead is not None:
        found["cpu"] = overhead_figure(overhead)
    return found


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.render", description=__doc__)
    parser.add_argument("results", type=Path, help="file that benchmarks.run wrote")
    parser.add_argument("overhead", type=Path, nargs="?", help="JSON of pytest-benchmark")
    parser.add_argument("--docs", type=Path, required=True, help="folder to write to")
    arguments = parser.parse_args()
    try:
        results = read_results(arguments.results)
        overhead = None if arguments.overhead is None else read_overhead(arguments.overhead)
    except (ResultsError, FileNotFoundError) as error:
        sys.exit(str(error))
    for file in write_page(results, overhead, arguments.docs):
        print(file)


if __name__ == "__main__":
    main()

"""The page of results as Markdown; imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from benchmarks.overhead import Overhead
from benchmarks.plan import HEADLINE_BATCH
from benchmarks.results import Results
from benchmarks.tables import (
    Table,
    build_table,
    environment_table,
    latency_table,
    memory_table,
    overhead_tables,
    problems,
    target_table,
)

__all__ = ["page"]

_INTRODUCTION: Final = """\
This page is made by `nox -s bench`: `python -m benchmarks.run` measures, `python -m
benchmarks.render` writes. Times hold for this machine only; the ratios are the point."""

_TRIAL: Final = """\
**This is a trial of the tool with tiny models in float32. Its figures say nothing about the
product.**"""

_METHOD: Final = """\
Each row is one process: eager, `torch.compile(mode="reduce-overhead")` and aitune (`ait.Module`
tuned with `OneBackendStrategy("onnxruntime")`, called through the module) run the same model on
the same inputs under `torch.no_grad()`. Weights are random from a seed, the rows of BERT differ
in length. Both compilers see one batch size only. Before it is timed, a result is compared with
eager's at values that it was not made with; one that is wrong gives an error instead of a figure.
The largest difference may be 0.1 % (float32), 1 % (float16) or 6 % (bfloat16) of the largest
value.

`p50` and `p90` are of calls with a device synchronisation after each; `pipelined` is the mean of
back-to-back calls with one synchronisation at the end. The contenders take turns in 6 rounds, at
least 100 calls of each kind. Microseconds."""

_TARGETS: Final = f"""\
Batch {HEADLINE_BATCH}, set for an NVIDIA H200. Figures are rounded to the side that is worse for
aitune."""

_LATENCIES: Final = """\
Cells are p50 / p90 / pipelined in microseconds. A ratio is the time of `torch.compile` divided by
that of aitune: above 1, aitune is faster. A difference is the largest absolute one from eager,
and what is allowed."""

_BUILDS: Final = f"""\
`tune` is the whole call: recording, export, checks against eager, measurement. `torch.compile` is
its first 3 calls, with empty caches. `load to first answer` is from `ait.load` to a first result,
copied to the CPU, in a new process, for batch {HEADLINE_BATCH}: the start of CUDA and the import
of ONNX Runtime are counted, imports of torch and aitune_core before it are not."""

_MEMORY: Final = """\
As the driver counts it, for the whole device: contexts, libraries and what PyTorch keeps for
later are in it. `before`: the model is on the device and was called, PyTorch's cache is empty.
The peak is of samples every 5 ms."""

_PROBLEMS: Final = "What went wrong or was left out:"


def page(results: Results | None, overhead: Overhead | None, pictures: Collection[str]) -> str:
    """Return the page.

    Args:
        results: Rows of models; None leaves their sections out.
        overhead: Costs of calls on the CPU; None leaves their section out.
        pictures: Names of the files that lie beside the page, such as
            ``"benchmarks-latency.png"``.
    """
    parts = ["# Benchmarks", _INTRODUCTION]
    if results is not None:
        parts += _model_parts(results, pictures)
    if overhead is not None:
        parts += _overhead_parts(overhead, pictures)
    return "\n\n".join(parts) + "\n"


def _model_parts(results: Results, pictures: Collection[str]) -> list[str]:
    parts = [_TRIAL] if results.small else []
    parts += ["## Where and how", str(environment_table(results))]
    starts = (f"- {run.date}: `{run.command}`" for run in results.runs)
    parts += ["\n".join(starts), _METHOD]
    if results.judged:
        parts += ["## Targets", _TARGETS, *_shown(target_table(results), "targets", pictures)]
    parts += ["## Latency", _LATENCIES, *_shown(latency_table(results), "latency", pictures)]
    found = problems(results)
    if found:
        parts += [_PROBLEMS, "\n".join(f"- {problem}" for problem in found)]
    parts += ["## Building and starting", _BUILDS]
    parts += _shown(build_table(results), "build", pictures)
    memory = memory_table(results)
    if memory is not None:
        parts += ["## Device memory", _MEMORY, *_shown(memory, "memory", pictures)]
    return parts


def _overhead_parts(overhead: Overhead, pictures: Collection[str]) -> list[str]:
    parts = [
        "## Calls on the CPU",
        f"`pytest tests/benchmarks --benchmark-only`, {overhead.date}, {overhead.machine}.",
    ]
    for group, table in overhead_tables(overhead).items():
        parts += [f"### {group[:1].upper()}{group[1:]}", str(table)]
    return parts + _picture("cpu", pictures)


def _shown(table: Table, name: str, pictures: Collection[str]) -> list[str]:
    return [str(table), *_picture(name, pictures)]


def _picture(name: str, pictures: Collection[str]) -> list[str]:
    file = f"benchmarks-{name}.png"
    return [f"![{_ALTERNATIVES[name]}]({file})"] if file in pictures else []


_ALTERNATIVES: Final = {
    "targets": "Times and ratios beside their targets",
    "latency": "Times of a call by model and batch size",
    "build": "Seconds of building and starting",
    "memory": "Device memory around the tuning",
    "cpu": "Times of calls on the CPU",
}

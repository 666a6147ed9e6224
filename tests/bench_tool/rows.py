"""Rows of results for tests."""

from __future__ import annotations

from benchmarks.results import Contender, Memory, Results, Row, Timing

CUDA = {"device": "NVIDIA H200", "CUDA": "13.0", "torch": "2.13.0"}
MIB = 2**20


def contender(p50_us: float, pipelined_us: float, build_seconds: float | None = None) -> Contender:
    return Contender(
        timing=Timing(p50_us=p50_us, p90_us=p50_us + 3, pipelined_us=pipelined_us, calls=102),
        build_seconds=build_seconds,
        max_difference=0.001,
        allowed_difference=0.04,
    )


def row(ours_us: float, compile_us: float, *, problem: str | None = None) -> Row:
    """Return a whole row; back to back, each call takes 10 us less."""
    return Row(
        contenders={
            "eager": contender(5000, 4990),
            "ours": contender(ours_us, ours_us - 10, 7.5),
            "compile": contender(compile_us, compile_us - 10, 31.25),
        },
        memory=Memory(
            before=600 * MIB,
            peak=2048 * MIB,
            after_tuning=1000 * MIB,
            after_calls=1001 * MIB,
        ),
        first_answer_seconds=2.5,
        problem=problem,
    )


def results(**rows: Row) -> Results:
    """Return results on a GPU; ``mlp_float32_8`` stands for ``mlp-float32-8``."""
    named = {name.replace("_", "-"): value for name, value in rows.items()}
    return Results(environment=CUDA, small=False, rows=named)

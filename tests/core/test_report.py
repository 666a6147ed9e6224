from __future__ import annotations

import json
import math
from typing import Any

import attrs
import pytest
import torch
from fake_plugin import empty_registry
from fakes import FakeBackend, Fault
from samples import Function, batches, mlp
from torch import Tensor

from aitune_core import (
    Attempt,
    BuildError,
    BuildRequest,
    Engine,
    FirstWinsStrategy,
    Module,
    TuneReport,
    tune,
)
from aitune_core._candidate_report import candidate_report
from aitune_core.results import Decision, Measurement, Outcome


class Tries(FakeBackend):
    def build(self, request: BuildRequest) -> Engine:
        request.record_attempt(Attempt("export with A", succeeded=False, detail="no A\nmore"))
        request.record_attempt(Attempt("export with B", succeeded=True))
        return super().build(request)


@pytest.fixture
def report() -> TuneReport:
    strategy = FirstWinsStrategy(
        [FakeBackend(fault=Fault.ZEROS, label="liar"), Tries()], allow_slower=True
    )
    model = Module(mlp().train(), "my-net", strategy=strategy)
    return tune(model, batches(2, 3), device="cpu", registry=empty_registry())


def test_report_is_valid_json_with_every_fact(report: TuneReport) -> None:
    data = json.loads(report.to_json(indent=2))
    assert data["device"] == "cpu"
    (module,) = data["modules"]
    assert (module["name"], module["strategy"]) == ("my-net", "first_wins")
    assert len(module["notes"]) == 1
    (graph,) = module["graphs"]
    assert graph["samples"] == 2
    assert graph["winner"] == "fake"
    liar, winner = graph["candidates"]
    assert liar["options"] == {"fault": "zeros", "label": "liar"}
    assert liar["check"] is None
    assert "ValidationError" in liar["error"]
    assert winner["error"] is None
    assert winner["check"]["cases"] == 10
    assert winner["measurement"]["p50_ms"] > 0
    assert [attempt["succeeded"] for attempt in winner["attempts"]] == [False, True]
    assert data["environment"]["torch"] == torch.__version__


def test_summary_names_module_graph_backend_and_reason(report: TuneReport) -> None:
    summary = report.summary()
    assert str(report) == summary
    for text in (
        "my-net",
        "first_wins",
        "eval mode",
        "graph_0",
        "batch[2..3]",
        "input: float32",
        "fake",
        "no: export with A: no A",
        "ok: export with B",
        report.modules[0].graphs[0].reason,
    ):
        assert text in summary
    assert "more" not in summary


def test_summary_of_a_failure_says_each_thing_once_and_in_short_lines() -> None:
    class Fails(Tries):
        def build(self, request: BuildRequest) -> Engine:
            super().build(request)
            msg = "none of 2 ways:\n1. A: no A\n2. B: " + 400 * "b"
            request.record_attempt(Attempt("export with C", succeeded=False, detail=400 * "c"))
            raise BuildError(msg)

    model = Module(mlp(), "net", strategy=FirstWinsStrategy([Fails()]))
    report = tune(model, batches(2), device="cpu", registry=empty_registry(), on_failure="eager")
    summary = report.summary()
    assert summary.count("no A") == 1
    assert "b" * 20 not in summary
    assert "graph_0: 1 call" in summary.splitlines()[2]
    assert "-> eager: no candidate won: fake failed: none of 2 ways:" in summary
    assert max(map(len, summary.splitlines())) <= 100
    assert 400 * "b" in report.to_json()


def test_summary_keeps_to_100_columns_whatever_the_names_and_numbers(report: TuneReport) -> None:
    slow = Measurement(
        p50_ms=123456.0, p90_ms=234567.0, p99_ms=345678.0, calls=2, samples_per_second=1e8
    )
    (module,) = report.modules
    (graph,) = module.graphs
    candidates = tuple(
        attrs.evolve(
            candidate, backend=f"backend{number}-" * 9, status="not tried", measurement=slow
        )
        for number, candidate in enumerate(graph.candidates)
    )
    graph = attrs.evolve(graph, candidates=candidates, eager=slow, reason="x" * 250)
    module = attrs.evolve(module, name="net" * 99, graphs=(graph,), notes=("\x1b[31mred",))
    summary = attrs.evolve(report, modules=(module,)).summary()
    assert max(map(len, summary.splitlines())) <= 100
    assert "123,456" in summary
    assert "100,000,000" in summary
    assert "\x1b" not in summary


def test_summary_lists_arguments_that_are_fixed() -> None:
    def forward(
        x: Tensor, k: int, mode: str = "a", *, deep: dict[str, Any] | None = None
    ) -> Tensor:
        return x * k

    model = Module(Function(forward).eval(), "net", strategy=FirstWinsStrategy([FakeBackend()]))
    calls = [((torch.ones(2), 3), {"deep": {"flag": True, "y": torch.ones(1)}})]
    report = tune(model, calls, device="cpu", registry=empty_registry(), dry_run=True)
    (graph,) = report.modules[0].graphs
    assert graph.constants == ("k = 3", "deep['flag'] = True")
    assert "    fixed: k = 3" in report.summary()


def test_error_keeps_the_chain_of_its_causes() -> None:
    error = BuildError("surface", step="export")
    error.__cause__ = OSError("deep")
    outcome = Outcome(backend=FakeBackend(), error=error)
    text = candidate_report(outcome, Decision(None, "failed")).error
    assert text is not None
    assert text.index("surface") < text.index("OSError: deep")


def test_endless_chain_of_causes_is_cut() -> None:
    error = BuildError("circle")
    error.__cause__ = error
    outcome = Outcome(backend=FakeBackend(), error=error)
    text = candidate_report(outcome, Decision(None, "failed")).error
    assert text is not None
    assert 1 <= text.count("circle") <= 10


def test_numbers_that_json_lacks_do_not_break_the_report(report: TuneReport) -> None:
    def refuse(constant: str) -> None:
        msg = f"{constant} is not JSON"
        raise ValueError(msg)

    data = json.loads(report.to_json(), parse_constant=refuse)
    difference = data["modules"][0]["graphs"][0]["candidates"][1]["check"]["worst_difference"]
    assert math.isfinite(difference)

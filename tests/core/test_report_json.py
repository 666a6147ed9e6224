"""Reports as JSON: the published schema, and the way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import jsonschema
import pytest
import torch
from fake_plugin import empty_registry
from fakes import AffineBackend, FakeBackend, Fault
from samples import Affine

from aitune_core import (
    FirstWinsStrategy,
    MaxThroughputStrategy,
    Module,
    ReportError,
    Strategy,
    TuneReport,
    tune,
)

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs/tune-report.schema.json").read_text(encoding="utf-8")
)


def tuned(strategy: Strategy, **settings: Any) -> TuneReport:
    model = Module(Affine().eval(), "net", strategy=strategy)
    calls = [torch.ones(rows, 4) for rows in (2, 3)]
    return tune(model, calls, device="cpu", registry=empty_registry(), **settings)


REPORTS = {
    "failed": lambda: tuned(
        FirstWinsStrategy([FakeBackend(fault=Fault.ZEROS), FakeBackend(fault=Fault.BUILD)]),
        on_failure="eager",
    ),
    "swept": lambda: tuned(MaxThroughputStrategy([AffineBackend()], allow_slower=True)),
    "dry run": lambda: tuned(FirstWinsStrategy([FakeBackend()]), dry_run=True),
}


@pytest.fixture(params=REPORTS)
def report(request: pytest.FixtureRequest) -> TuneReport:
    return REPORTS[request.param]()


def test_report_fits_the_schema_and_comes_back_equal(report: TuneReport) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    text = report.to_json()
    jsonschema.validate(json.loads(text), SCHEMA, cls=jsonschema.Draft202012Validator)
    assert TuneReport.from_json(text) == report
    assert TuneReport.from_json(text.encode()) == report


def test_schema_names_every_field(report: TuneReport) -> None:
    def names(record: Any) -> list[str]:
        return [field.name for field in attrs.fields(type(record))]

    assert SCHEMA["required"] == ["schema_version", *names(report)]
    assert SCHEMA["$defs"]["ModuleReport"]["required"] == names(report.modules[0])
    assert SCHEMA["$defs"]["GraphReport"]["required"] == names(report.modules[0].graphs[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:-1], "not JSON"),
        (lambda _: "[]", "no report"),
        (lambda _: "{}", "no report"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 2'), "version 2"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": true'), "True"),
        (lambda text: text.replace('"seconds": ', '"seconds": "soon", "x": ', 1), "seconds"),
        (lambda text: text.replace('"dry_run": ', '"dry_running": '), "dry_run"),
        (lambda text: text.replace('"status": "failed"', '"status": 3'), "status"),
        (lambda _: 100_000 * "[", "not JSON"),
    ],
)
def test_text_that_is_no_report_is_refused(change: Any, words: str) -> None:
    text = REPORTS["failed"]().to_json()
    with pytest.raises(ReportError, match=words):
        TuneReport.from_json(change(text))

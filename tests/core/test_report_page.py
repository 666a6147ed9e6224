"""The page of a report: what is in it, and how it is written."""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path

import pytest
import torch
from fake_plugin import empty_registry
from fakes import AffineBackend, FakeBackend, Fault
from samples import Affine

from aitune_core import (
    BatchDim,
    MaxThroughputStrategy,
    MissingExtraError,
    Module,
    ReportError,
    TuneReport,
    tune,
)

NAME = "net <script>document.title = 'broken'</script> & co"


@pytest.fixture(scope="module")
def report() -> TuneReport:
    candidates = [AffineBackend(), FakeBackend(fault=Fault.ZEROS), FakeBackend(fault=Fault.BUILD)]
    strategy = MaxThroughputStrategy(candidates, allow_slower=True)
    model = Module(
        Affine().eval(), NAME, strategy=strategy, dynamic_shapes={"x": {0: BatchDim(1, 8)}}
    )
    calls = [torch.ones(rows, 4) for rows in (2, 3)]
    return tune(model, calls, device="cpu", registry=empty_registry())


@pytest.fixture(scope="module")
def page(report: TuneReport, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.to_html(tmp_path_factory.mktemp("page") / "report.html")


def test_page_holds_everything_and_loads_nothing(report: TuneReport, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    (graph,) = report.modules[0].graphs
    for words in (graph.reason, *(candidate.reason for candidate in graph.candidates)):
        assert words in html.unescape(text)
    assert not re.search(r"<(script|link|img|iframe)\b", text)
    assert not re.search(r"(src|href)=\"(?!#)", text.replace('xlink:href="#', ""))
    assert re.findall(r"<h4>(.*?)</h4>", text) == [
        "Latency",
        "Throughput",
        "Error against tolerance",
        "Time spent",
    ]
    assert text.count("<svg ") == 4
    names = re.findall(r' id="([^"]+)"', text)
    assert len(names) == len(set(names))


def test_names_are_text(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<script>document" not in text
    assert "net &lt;script&gt;" in text


def test_file_that_is_there_is_replaced_whole(report: TuneReport, tmp_path: Path) -> None:
    target = tmp_path / "ré port.html"
    target.write_text("before")
    assert report.to_html(str(target)) == target
    assert target.read_text(encoding="utf-8").endswith("</html>")
    assert list(tmp_path.iterdir()) == [target]


def test_path_that_cannot_be_written_is_refused_and_leaves_nothing(
    report: TuneReport, tmp_path: Path
) -> None:
    with pytest.raises(ReportError, match="is a folder; give the name of a file"):
        report.to_html(tmp_path)
    with pytest.raises(ReportError, match=r"cannot be written to .*No such file"):
        report.to_html(tmp_path / "missing" / "report.html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["altair", "jinja2", "vl_convert"])
def test_without_the_extra_the_error_names_it(
    report: TuneReport, tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("aitune_core._page")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf'{package}.*pip install "aitune-core\[report\]"'):
        report.to_html(tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []

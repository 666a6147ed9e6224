"""The page of a report in a browser, at the width of a phone and of a desk."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import attrs
import pytest
import torch
from fake_plugin import empty_registry
from paced import PacedBackend, Slow

from aitune_core import BatchDim, BatchPoint, MaxThroughputStrategy, Module, TuneReport, tune

BROWSER: Final = shutil.which("chromium") or shutil.which("google-chrome")
#: Windows of a browser have a least width; a frame has none. It says in the title how wide its
#: page is and could be, and which charts are seen.
FRAME: Final = """<!doctype html><title>none</title>
<iframe width="{width}" height="900" style="border: 0" srcdoc="{page}"></iframe>
<script>
onload = () => {{
  const page = document.querySelector("iframe").contentDocument;
  const charts = [...page.querySelectorAll("figure svg")].map((svg) => svg.getBoundingClientRect());
  const seen = charts.filter((box) => box.height > 50 && box.left >= 0 && box.right <= {width});
  const {{scrollWidth, clientWidth}} = page.documentElement;
  document.title = [scrollWidth, clientWidth, seen.length, charts.length].join("/");
}};
</script>
"""


@pytest.fixture(scope="module")
def report() -> TuneReport:
    """Return a report with a long name and several candidates."""
    candidates = [
        PacedBackend(0.5, 0.1),
        PacedBackend(1.0, 0.5),
        PacedBackend(9.0),
    ]
    strategy = MaxThroughputStrategy(candidates, allow_slower=True)
    model = Module(
        Slow().eval(),
        f"encoder_{'long' * 40}",
        strategy=strategy,
        dynamic_shapes={"x": {0: BatchDim(1, 8)}},
    )
    return tune(model, [torch.ones(2, 4)], device="cpu", registry=empty_registry())


def in_frame(report: TuneReport, folder: Path, width: int) -> tuple[int, ...]:
    page = report.to_html(folder / "report.html").read_text(encoding="utf-8")
    frame = folder / "frame.html"
    frame.write_text(FRAME.format(width=width, page=html.escape(page)), encoding="utf-8")
    result = subprocess.run(
        [
            *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu"),
            *(f"--user-data-dir={folder / 'user'}", "--window-size=1400,1000"),
            *("--virtual-time-budget=5000", "--dump-dom", frame.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r"<title>(\d+)/(\d+)/(\d+)/(\d+)</title>", result.stdout)
    assert found, result.stdout[:500]
    return tuple(map(int, found.groups()))


@pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_page_and_its_charts_fit(report: TuneReport, tmp_path: Path, width: int) -> None:
    needed, there, seen, charts = in_frame(report, tmp_path, width)
    assert width - 20 <= there <= width
    assert needed <= there
    assert seen == charts == 4


def test_batch_sizes_that_did_not_run_are_on_the_page(report: TuneReport, tmp_path: Path) -> None:
    (module,) = report.modules
    (graph,) = module.graphs
    (first, *others) = graph.candidates
    assert first.measurement is not None
    ended = (*first.measurement.batches, BatchPoint(batch_size=16, error="out of memory"))
    first = attrs.evolve(first, measurement=attrs.evolve(first.measurement, batches=ended))
    graph = attrs.evolve(graph, candidates=(first, *others))
    report = attrs.evolve(report, modules=(attrs.evolve(module, graphs=(graph,)),))
    text = report.to_html(tmp_path / "report.html").read_text(encoding="utf-8")
    row = re.search(r"<tr><td>[^<]*</td><td>16</td>.*?</tr>", text)
    assert row
    assert "out of memory" in row[0]

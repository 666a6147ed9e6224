from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from benchmarks.overhead import read_overhead
from benchmarks.page import page
from benchmarks.plan import CASES
from benchmarks.results import Results, ResultsError, Run, write_atomically

from . import rows

PYTEST_BENCHMARK = {
    "machine_info": {"cpu": {"brand_raw": "Fast CPU", "count": 2}, "python_version": "3.11.7"},
    "datetime": "2026-12-03T16:48:01+00:00",
    "benchmarks": [
        {
            "group": group,
            "name": name,
            "fullname": f"tests/benchmarks/test_calls.py::{name}",
            "stats": {"median": median},
            "extra_info": {"tensors": 8},
        }
        for group, name, median in (
            ("calls", "test_nested_call", 3e-4),
            ("calls", "test_flat_call[8]", 4.7e-5),
            (None, "test_lone", 1e-6),
        )
    ],
}


def everything() -> Results:
    found = rows.results(**{case.key.replace("-", "_"): rows.row(700, 1000) for case in CASES})
    run = Run(date="2026-12-03", command="python -m benchmarks.run --out results.json")
    return found.with_run(run, rows.CUDA, small=False)


def overhead_file(folder: Path) -> Path:
    file = folder / "cpu-overhead.json"
    write_atomically(file, json.dumps(PYTEST_BENCHMARK))
    return file


def test_overhead_is_read_in_microseconds_and_words(tmp_path: Path) -> None:
    overhead = read_overhead(overhead_file(tmp_path))
    assert (overhead.machine, overhead.date) == ("Fast CPU, 2 cores, Python 3.11.7", "2026-12-03")
    assert [row.name for row in overhead.rows] == ["flat call [8]", "lone", "nested call"]
    assert overhead.rows[0].p50_us == pytest.approx(47)
    assert overhead.rows[0].facts == {"tensors": "8"}


def test_another_file_is_no_overhead(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ResultsError, match=r"other\.json is no file of pytest-benchmark"):
        read_overhead(tmp_path / "other.json")


def test_page_names_command_environment_and_pictures() -> None:
    text = page(everything(), None, ["benchmarks-latency.png"])
    assert "- 2026-12-03: `python -m benchmarks.run --out results.json`" in text
    assert "| device | NVIDIA H200 |" in text
    assert "](benchmarks-latency.png)" in text
    assert "](benchmarks-memory.png)" not in text
    assert "## Targets" in text
    assert "What went wrong" not in text


def test_trials_and_cpus_are_not_judged() -> None:
    trial = page(attrs.evolve(everything(), small=True), None, [])
    on_cpu = page(attrs.evolve(everything(), environment={"device": "CPU, 2 cores"}), None, [])
    for text in (trial, on_cpu):
        assert "## Latency" in text
        assert "## Targets" not in text
    assert "trial of the tool" in trial
    assert "trial of the tool" not in on_cpu


def test_pictures_are_written_and_old_ones_removed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.render import write_page  # noqa: PLC0415

    old = tmp_path / "benchmarks-old.png"
    old.touch()
    written = write_page(everything(), read_overhead(overhead_file(tmp_path)), tmp_path)
    names = [file.name for file in written]
    assert names[0] == "benchmarks.md"
    assert set(names[1:]) == {
        f"benchmarks-{name}.png" for name in ("targets", "latency", "build", "memory", "cpu")
    }
    text = written[0].read_text()
    for file in written[1:]:
        assert file.read_bytes().startswith(b"\x89PNG")
        assert f"]({file.name})" in text
    assert not old.exists()


def test_pictures_of_nothing_are_left_out(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.render import write_page  # noqa: PLC0415

    assert write_page(rows.results(), None, tmp_path) == [tmp_path / "benchmarks.md"]


def test_no_text_of_a_picture_is_cut_off(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import figures  # noqa: PLC0415

    drawn = [
        figures.latency_figure(everything()),
        figures.target_figure(everything()),
        figures.build_figure(everything()),
        figures.memory_figure(everything()),
        figures.overhead_figure(read_overhead(overhead_file(tmp_path))),
    ]
    for figure in drawn:
        assert figure is not None
        figure.draw_without_rendering()
        outer = figure.bbox
        for axis in figure.axes:
            for text in (*axis.texts, axis.xaxis.label, axis.title, *axis.get_yticklabels()):
                inner = text.get_window_extent()
                assert outer.x0 <= inner.x0, text.get_text()
                assert inner.x1 <= outer.x1, text.get_text()

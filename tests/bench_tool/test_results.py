from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import attrs
import pytest
from benchmarks.results import (
    Contender,
    ResultsError,
    Row,
    Run,
    read_results,
    read_row,
    write_atomically,
)

from . import rows

RUN = Run(date="2026-12-03", command="python -m benchmarks.run --out results.json")


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    written = rows.results(mlp_float32_8=rows.row(50, 200), vit_float16_1=Row(problem="lost"))
    written = written.with_run(RUN, rows.CUDA, small=False)
    written.write(file)
    assert read_results(file) == written
    assert list(tmp_path.iterdir()) == [file]


def test_a_row_comes_back_from_its_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "row.json", rows.row(50, 200).to_json())
    assert read_row(tmp_path / "row.json") == rows.row(50, 200)


def test_a_later_row_takes_the_place_of_an_earlier_one() -> None:
    first = rows.results(mlp_float32_8=Row(problem="lost"), vit_float16_8=rows.row(9, 9))
    second = first.with_row("mlp-float32-8", rows.row(50, 200))
    assert second.rows == {"mlp-float32-8": rows.row(50, 200), "vit-float16-8": rows.row(9, 9)}


@pytest.mark.parametrize(
    ("environment", "small", "named"),
    [
        ({**rows.CUDA, "torch": "2.14.0"}, False, "torch = '2.13.0'"),
        ({"device": "NVIDIA H200", "torch": "2.13.0"}, False, "CUDA = '13.0'"),
        (rows.CUDA, True, "small = 'False'"),
    ],
)
def test_rows_of_another_environment_are_refused(
    environment: dict[str, str], small: bool, named: str
) -> None:
    with pytest.raises(ResultsError, match=f"{named}.*name another file with --out"):
        rows.results().with_run(RUN, environment, small=small)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"environment": {}}', '{"environment": {}, "small": false, "odd": 1}']
)
def test_another_file_is_refused_by_name(tmp_path: Path, content: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(ResultsError, match=r"other\.json is no file of results"):
        read_results(file)


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    rows.results().write(file)
    before = file.read_text()
    broken = rows.results(mlp_float32_8=Row(problem=cast("str", object())))
    with pytest.raises(TypeError):
        broken.write(file)
    assert file.read_text() == before
    assert json.loads(before)["rows"] == {}


def test_a_row_is_settled_when_nothing_is_left_to_measure() -> None:
    whole = rows.row(50, 200)
    left_out = attrs.evolve(
        whole, contenders={**whole.contenders, "compile": Contender(problem="left out: no time")}
    )
    assert whole.settled(compiles=True)
    assert left_out.settled(compiles=False)
    assert not left_out.settled(compiles=True)
    assert not rows.row(50, 200, problem="lost").settled(compiles=False)
    assert not Row().settled(compiles=False)

from __future__ import annotations

import attrs
from benchmarks.overhead import Overhead, OverheadRow
from benchmarks.plan import CASES
from benchmarks.results import Contender, Row
from benchmarks.tables import (
    Table,
    build_table,
    latency_table,
    memory_table,
    overhead_tables,
    problems,
    target_table,
)

from . import rows


def cells(table: Table, title: str, batch: int | None = None) -> dict[str, str]:
    """Return the cells of one line by their column."""
    (found,) = (
        line for line in table.rows if line[0] == title and (batch is None or line[1] == str(batch))
    )
    return dict(zip(table.header, found, strict=True))


MLP = "MLP, 4 linear layers of 256, float32"
BERT = "BERT-base, length 128, float16"


def test_a_target_is_met_at_its_limit_and_missed_just_beyond() -> None:
    at = target_table(
        rows.results(mlp_float32_8=rows.row(65, 260), bert_float16_8=rows.row(1180, 1416))
    )
    assert cells(at, MLP)["p50 us"] == "65.0: **met** (<= 65)"
    assert cells(at, MLP)["torch.compile p50 / aitune p50"] == "4.00: **met** (>= 4.00)"
    assert cells(at, BERT)["p50 us"] == "1,180: **met** (<= 1,180)"
    assert cells(at, BERT)["p50 us, later target"] == "1,180: **missed** (<= 950)"
    beyond = target_table(
        rows.results(mlp_float32_8=rows.row(65.01, 260), bert_float16_8=rows.row(1180.2, 1170.2))
    )
    # The shown figures are missed too: they are rounded to the worse side.
    assert cells(beyond, MLP)["p50 us"] == "65.1: **missed** (<= 65)"
    assert cells(beyond, MLP)["torch.compile p50 / aitune p50"] == "3.99: **missed** (>= 4.00)"
    assert cells(beyond, BERT)["p50 us"] == "1,181: **missed** (<= 1,180)"
    pipelined = cells(beyond, BERT)["torch.compile pipelined / aitune pipelined"]
    assert pipelined == "0.99: **missed** (>= 1.00)"


def test_targets_without_a_figure_are_not_called_met_or_missed() -> None:
    wrong = attrs.evolve(rows.row(50, 900), contenders={"ours": Contender(problem="wrong result")})
    table = target_table(rows.results(mlp_float32_8=wrong))
    for title in (MLP, BERT):
        assert cells(table, title)["p50 us"].startswith("not measured")
        assert cells(table, title)["torch.compile p50 / aitune p50"].startswith("not measured")
    assert "met**" not in str(table)
    assert "missed" not in str(table)


def test_latencies_list_every_case() -> None:
    table = latency_table(rows.results(bert_float16_8=rows.row(900, 1350)))
    assert len(table.rows) == len(CASES)
    line = cells(table, BERT, 8)
    assert line["aitune"] == "900 / 903 / 890"
    assert line["torch.compile"] == "1,350 / 1,353 / 1,340"
    assert (line["p50 ratio"], line["pipelined ratio"]) == ("1.50", "1.50")
    assert line["difference, aitune"] == "0.001 of 0.04"
    assert cells(table, BERT, 1)["aitune"] == "not run"


def test_errors_and_what_was_left_out_are_told_apart() -> None:
    whole = rows.row(900, 1350)
    left_out = Contender(problem="left out: --no-compile")
    wrong = Contender(problem="WrongResultError: wrong result: differs")
    found = rows.results(
        bert_float16_1=attrs.evolve(whole, contenders={**whole.contenders, "compile": left_out}),
        bert_float16_8=attrs.evolve(whole, contenders={**whole.contenders, "ours": wrong}),
        bert_float16_64=Row(problem="exit status 1: out of memory"),
    )
    table = latency_table(found)
    assert cells(table, BERT, 1)["torch.compile"] == "left out"
    assert cells(table, BERT, 1)["p50 ratio"] == "-"
    assert cells(table, BERT, 8)["aitune"] == "error"
    assert {cells(table, BERT, 64)[name] for name in ("eager", "aitune")} == {"error"}
    assert problems(found) == [
        f"{BERT}, batch 8: aitune: {wrong.problem}",
        f"{BERT}, batch 1: torch.compile: {left_out.problem}",
        f"{BERT}, batch 64: exit status 1: out of memory",
    ]


def test_build_seconds_and_memory_are_of_the_rows_that_were_run() -> None:
    found = rows.results(
        bert_float16_8=rows.row(900, 1350), mlp_float32_8=attrs.evolve(rows.row(9, 9), memory=None)
    )
    assert [line[0] for line in build_table(found).rows] == [MLP, BERT]
    assert cells(build_table(found), BERT)["tune s"] == "7.5"
    assert cells(build_table(found), BERT)["load to first answer s"] == "2.5"
    memory = memory_table(found)
    assert memory is not None
    assert memory.rows == ((BERT, "8", "600", "2,048", "1,000", "1,001"),)
    assert memory_table(rows.results(bert_float16_8=Row())) is None


def test_overhead_has_a_column_per_fact() -> None:
    overhead = Overhead(
        machine="CPU",
        date="2026-12-03",
        rows=(
            OverheadRow(group="calls", name="flat [1]", p50_us=12.345, facts={"tensors": "1"}),
            OverheadRow(group="calls", name="bare", p50_us=1, facts={"what": "a | b"}),
            OverheadRow(group="", name="lone", p50_us=2, facts={}),
        ),
    )
    tables = overhead_tables(overhead)
    assert list(tables) == ["calls", "others"]
    assert tables["calls"].header == ("call", "p50 us", "tensors", "what")
    assert tables["calls"].rows == (("flat [1]", "12.35", "1", ""), ("bare", "1.00", "", "a | b"))
    assert "| bare | 1.00 |  | a / b |" in str(tables["calls"])
    assert [row.label for row in overhead.rows] == ["flat, tensors 1", "bare, a | b", "lone"]

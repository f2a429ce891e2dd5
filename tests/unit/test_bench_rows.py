"""Measured rows: every one is a claim that can be checked, and the tables show the newest."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from repository import ROOT, script

from hotset.bench.rows import Row

table = script("bench_table")


def row(**changes: Any) -> Row:
    values: dict[str, Any] = {
        "bench": "experts",
        "case": "a case",
        "figure": "time of a step",
        "unit": "ms",
        "p20": 1.0,
        "p50": 2.0,
        "p80": 3.0,
        "repeats": 5,
        "sol": 1.8,
        "ratio_to_sol": 0.9,
        "command": "hotset bench experts",
        "commit": "0123abc",
        "machine": "a machine",
        "versions": {"torch": "1"},
        "date": "2026-01-02",
    }
    return Row(**(values | changes))


def test_every_committed_row_is_valid_and_the_tables_are_fresh(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = table.main(["--check"])
    assert status == 0, capsys.readouterr().err


def test_a_sound_row_has_no_problems() -> None:
    assert table.problems_of(asdict(row())) == []
    assert table.problems_of(asdict(row(sol=2.5, ratio_to_sol=0.8))) == []  # a rate
    assert table.problems_of(asdict(row(sol=None, ratio_to_sol=None))) == []


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"p20": 2.5}, "ascending"),
        ({"p50": float("nan")}, "finite"),
        ({"repeats": 0}, "repeats"),
        ({"command": " "}, "command"),
        ({"commit": "unknown"}, "commit"),
        ({"versions": {}}, "versions"),
        ({"date": "yesterday"}, "date"),
        ({"sol": None}, "go together"),
        ({"ratio_to_sol": 0.5}, "p50 / sol"),
        ({"baseline": "another program"}, "go together"),
        ({"baseline": "", "ratio_to_baseline": 2.0}, "baseline"),
    ],
)
def test_an_unsound_row_is_named(changes: dict[str, Any], part: str) -> None:
    assert part in " ".join(table.problems_of(asdict(row(**changes))))


def test_a_row_with_other_fields_is_refused() -> None:
    assert table.problems_of(asdict(row()) | {"note": "fast"})
    assert table.problems_of([1, 2])


def test_of_equal_figures_the_newest_is_shown() -> None:
    rows = [row(p50=2.0), row(case="another"), row(p50=2.5, ratio_to_sol=0.72)]
    assert [r.p50 for r in table.newest(rows)] == [2.5, 2.0]
    assert "2.5" in table.all_tables(rows) and "hotset bench experts" in table.all_tables(rows)


def test_a_model_that_was_cut_is_another_case() -> None:
    whole, cut = row(), row(command="hotset bench experts --layers 8 --match", p50=1.9, p20=1.8)
    assert table.newest([whole, cut]) == [whole, cut]
    assert [table.shown_case(r) for r in (whole, cut)] == ["a case", "a case, 8 layers"]


def test_columns_that_no_row_fills_are_left_out() -> None:
    rows = [row(unit="bytes", p20=0, p50=2**31, p80=2**32, sol=None, ratio_to_sol=None)]
    shown = table.all_tables(rows)
    assert "2.00 GiB | 0 B to 4.00 GiB |" in shown and "speed of light" not in shown


def test_a_headline_takes_its_number_from_a_row() -> None:
    headline = {"bench": "experts", "case": "a case", "figure": "time of a step", "say": "Experts"}
    shown = table.headline_table([row(baseline="copies", ratio_to_baseline=1.5)], [headline])
    assert "| Experts | a machine | 2 ms | 0.90 | 1.5 x copies |" in shown
    with pytest.raises(ValueError, match="no row"):
        table.headline_table([], [headline])


def test_only_what_is_between_the_markers_is_replaced() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    once = table.replace_block(page, "new")
    assert table.replace_block(once, "new") == once
    assert once.split("<!--")[0] == page.split("<!--")[0]
    with pytest.raises(ValueError, match="once each"):
        table.replace_block("no markers", "new")

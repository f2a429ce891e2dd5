"""Checks the measured rows of benchmarks/ and writes the tables that show them.

`python scripts/bench_table.py` writes, `--check` only compares and exits with 1. Rows are JSON
lines written by `hotset bench --rows`; the newest of each figure is shown. README.md shows those
that benchmarks/headlines.json picks. Measures nothing and rounds only for display.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Any

from hotset.bench.rows import Row
from hotset.core.units import format_bytes

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "benchmarks" / "results.jsonl"
HEADLINES = ROOT / "benchmarks" / "headlines.json"

# Achieved share of the speed of light: a rate over it, or its time over ours. Both are rounded by
# whoever writes the row, hence one percent.
RATIO_RTOL = 0.01

_BEGIN, _END = "<!-- begin rows: `make bench-table` -->", "<!-- end rows -->"


def main(args: list[str]) -> int:
    """Writes both tables, or with `--check` compares; 1 where a row is wrong or a table stale."""
    rows, wrong = read_rows(ROWS)
    stale = []
    for name, block in blocks(rows).items():
        file = ROOT / name
        before = file.read_text(encoding="utf-8")
        after = replace_block(before, block)
        if after != before:
            stale.append(f"{name} is stale, run `make bench-table`")
            if args != ["--check"]:
                file.write_text(after, encoding="utf-8")
    problems = wrong + (stale if args == ["--check"] else [])
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    return 1 if problems else 0


def blocks(rows: Sequence[Row]) -> dict[str, str]:
    """The generated block of each page."""
    return {
        "benchmarks/README.md": all_tables(rows),
        "README.md": headline_table(rows, json.loads(HEADLINES.read_text(encoding="utf-8"))),
    }


def replace_block(text: str, block: str) -> str:
    """The page with what stands between its two markers replaced.

    Raises:
        ValueError: a marker is missing or there twice.
    """
    if text.count(_BEGIN) != 1 or text.count(_END) != 1:
        raise ValueError(f"the page needs `{_BEGIN}` and `{_END}` once each")
    head, _, rest = text.partition(_BEGIN)
    return f"{head}{_BEGIN}\n\n{block}\n{_END}{rest.partition(_END)[2]}"


def read_rows(file: Path) -> tuple[list[Row], list[str]]:
    """All valid rows of a file, and a sentence for everything that is wrong with the others."""
    rows, wrong = [], []
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            data = json.loads(line)
        except ValueError as error:
            wrong.append(f"{file.name}:{number}: not JSON: {error}")
            continue
        found = problems_of(data)
        wrong += [f"{file.name}:{number}: {problem}" for problem in found]
        if not found:
            rows.append(Row(**data))
    return rows, wrong


def problems_of(data: Any) -> list[str]:
    """What is wrong with one row; nothing when it is a claim that can be checked."""
    names = {field.name for field in fields(Row)}
    if not isinstance(data, dict) or data.keys() != names:
        return [f"its fields are not exactly {', '.join(sorted(names))}"]
    found = [f"`{name}` is empty" for name in _TEXTS if not _is_text(data[name])]
    numbers = [data[name] for name in ("p20", "p50", "p80")]
    if not all(_is_number(value) for value in numbers):
        found.append("p20, p50 and p80 are not all finite numbers")
    elif sorted(numbers) != numbers:
        found.append("p20, p50 and p80 are not in ascending order")
    if not isinstance(data["repeats"], int) or data["repeats"] < 1:
        found.append("`repeats` is not a positive count")
    if not re.fullmatch(r"[0-9a-f]{7,40}", str(data["commit"])):
        found.append(f"`commit` is `{data['commit']}`, not a commit")
    if not isinstance(data["versions"], dict) or not data["versions"]:
        found.append("`versions` names no package")
    try:
        date.fromisoformat(str(data["date"]))
    except ValueError:
        found.append(f"`date` is `{data['date']}`, not YYYY-MM-DD")
    return found or _ratio_problems(data)


_TEXTS = ("bench", "case", "figure", "unit", "command", "machine")


def _ratio_problems(data: dict[str, Any]) -> list[str]:
    found = []
    for value, ratio in (("sol", "ratio_to_sol"), ("baseline", "ratio_to_baseline")):
        if (data[value] is None) != (data[ratio] is None):
            found.append(f"`{value}` and `{ratio}` go together")
        elif data[ratio] is not None and not (_is_number(data[ratio]) and data[ratio] > 0):
            found.append(f"`{ratio}` is not a positive number")
    if data["baseline"] is not None and not _is_text(data["baseline"]):
        found.append("`baseline` does not name anything")
    sol = data["sol"]
    if sol is None or found:
        return found
    if not _is_number(sol) or sol <= 0 or data["p50"] <= 0:
        return ["`sol` and `p50` are not positive numbers"]
    share = data["p50"] / sol
    if not any(_is_close(data["ratio_to_sol"], ratio) for ratio in (share, 1 / share)):
        found.append(f"`ratio_to_sol` is {data['ratio_to_sol']}, but p50 / sol is {share:.4g}")
    return found


def _is_close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=RATIO_RTOL)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def newest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each bench, case, figure and machine, in the order of their first ones."""
    latest: dict[tuple[str, str, str, str], Row] = {}
    for row in rows:
        latest[row.bench, shown_case(row), row.figure, row.machine] = row
    return list(latest.values())


def shown_case(row: Row) -> str:
    """The case, and the number of layers where the command cut the model to fewer: figures of
    eight layers are not newer ones of the whole model."""
    cut = re.search(r"--layers (\d+)", row.command)
    return row.case if cut is None else f"{row.case}, {cut[1]} layers"


def all_tables(rows: Sequence[Row]) -> str:
    """One table for each bench and machine, its commands below it."""
    if not rows:
        return "No row yet.\n"
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in newest(rows):
        groups.setdefault((row.bench, row.machine), []).append(row)
    return "\n".join(_group(*key, group) for key, group in groups.items())


def _group(bench: str, machine: str, rows: list[Row]) -> str:
    runs = dict.fromkeys((row.command, row.commit, row.date, _versions(row)) for row in rows)
    lines = [
        f"### {bench}, {machine}\n",
        *_table(_COLUMNS, [_cells(row) for row in rows]),
        "",
        *(
            f"`{command}`, commit {commit}, {day}; {versions}.\n"
            for command, commit, day, versions in runs
        ),
    ]
    return "\n".join(lines)


_COLUMNS = ("case", "figure", "p50", "p20 to p80", "speed of light", "share of it", "against")


def _cells(row: Row) -> tuple[str, ...]:
    spread = f"{_value(row.p20, row.unit)} to {_value(row.p80, row.unit)}"
    return (
        shown_case(row),
        row.figure,
        _value(row.p50, row.unit),
        spread if row.repeats > 1 else "",
        "" if row.sol is None else _value(row.sol, row.unit),
        "" if row.ratio_to_sol is None else f"{row.ratio_to_sol:.3f}",
        _against(row),
    )


def _table(heads: Sequence[str], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a Markdown table, without the columns that no row fills."""
    used = [index for index in range(len(heads)) if any(row[index] for row in rows)]
    lines = [heads, ["---:" if index > 1 else "---" for index in range(len(heads))], *rows]
    return ["| " + " | ".join(line[index] for index in used) + " |" for line in lines]


def headline_table(rows: Sequence[Row], headlines: Sequence[dict[str, str]]) -> str:
    """The figures of the README: `say` of each headline beside the newest row that it names.

    Raises:
        ValueError: a headline names no row.
    """
    if not headlines:
        return "No figure has been measured with a committed row yet.\n"
    known = {(row.bench, shown_case(row), row.figure): row for row in newest(rows)}
    cells = []
    for headline in headlines:
        key = (headline["bench"], headline["case"], headline["figure"])
        if key not in known:
            raise ValueError(f"headline {key} has no row in {ROWS.name}")
        row = known[key]
        share = "" if row.ratio_to_sol is None else f"{row.ratio_to_sol:.2f}"
        shown = _value(row.p50, row.unit)
        cells.append((headline["say"], row.machine, shown, share, _against(row)))
    heads = ("what", "where", "measured", "share of the speed of light", "against")
    return "\n".join([*_table(heads, cells), ""])


def _against(row: Row) -> str:
    return "" if row.baseline is None else f"{_short(row.ratio_to_baseline or 0)} x {row.baseline}"


def _versions(row: Row) -> str:
    return ", ".join(f"{name} {version}" for name, version in row.versions.items())


def _value(number: float, unit: str) -> str:
    """A number with its unit, rounded to what can be read; a plain share without."""
    if unit == "bytes":
        return format_bytes(number)
    return f"{_short(number)} {unit}".removesuffix(" share")


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What the picture of `bench decode` draws, from its rows."""

from __future__ import annotations

from hotset.bench.rows import Row, Spread
from hotset.cli.decode_plot import lines, points


def row(case: str, value: float, figure: str = "decode") -> Row:
    spread = Spread.of([value])
    return Row(bench="decode", case=case, figure=figure, unit="tokens/s", **vars(spread))


ROWS = [
    row("tiny, no cache, 16 context", 1.0),
    row("tiny int4, no cache, 16 context, batch 2", 2.0),
    row("tiny, 25% of layers on the device, accelerate offload, 16 context", 0.5),
    row("tiny, 12.5% slots, half-life 16, 16 context", 3.0),
    row("tiny, 25% slots, half-life 16, 16 context", 4.0),
    row("tiny, 25% slots, half-life 16, 16 context, batch 2", 7.0),
    row("tiny, 25% slots, half-life 64, 16 context", 5.0),
    row("tiny, 25% slots, lru, 16 context", 2.5),
    row("tiny, 25% slots, lru, 16 context", 0.9, "hit rate"),
]


def test_points_of_each_policy_and_batch() -> None:
    assert points(ROWS) == {
        ("accelerate offload", ""): [(25.0, 0.5)],
        ("half-life 16", ""): [(12.5, 3.0), (25.0, 4.0)],
        ("half-life 16", "batch 2"): [(25.0, 7.0)],
        ("half-life 64", ""): [(25.0, 5.0)],
        ("lru", ""): [(25.0, 2.5)],
        ("no cache", ""): [(12.5, 1.0), (25.0, 1.0)],
        ("no cache", "batch 2"): [(12.5, 2.0), (25.0, 2.0)],
    }


def test_colours_are_of_policies_and_markers_of_batches() -> None:
    found = {curve.name: curve for curve in lines(ROWS)}
    one, two = found["half-life 16"], found["half-life 16, batch 2"]
    assert one.colour == two.colour != found["half-life 64"].colour
    assert one.marker == found["lru"].marker != two.marker
    assert [name for name, curve in found.items() if curve.dashed] == [
        "accelerate offload",
        "no cache",
        "no cache, batch 2",
    ]

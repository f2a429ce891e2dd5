"""Published shapes: every one names a model type, and a config alone is enough for a plan."""

from __future__ import annotations

import pytest
from repository import ROOT
from transformers import CONFIG_MAPPING

from hotset.bench.shapes import shape_config, shape_names
from hotset.core.config import EngineConfig
from hotset.core.errors import ConfigError
from hotset.core.machine import MachineDescription
from hotset.models.geometry import build_meta
from hotset.runtime.planning import GRAPH_BYTES, plan_engine


@pytest.mark.parametrize("name", shape_names())
def test_every_shape_is_known_and_has_a_row_in_the_guide(name: str) -> None:
    config = shape_config(name)
    assert config.model_type in CONFIG_MAPPING
    if name != "tiny":
        page = (ROOT / "docs/guides/plans.md").read_text(encoding="utf-8")
        assert f"| {name} |" in page


@pytest.mark.parametrize("machine", ["rtx-4090", "rtx-pro-6000"])
def test_a_config_alone_is_planned_on_paper(machine: str) -> None:
    """OLMoE: 1,024 experts of 12 MiB in BF16, as published."""
    geometry = build_meta(shape_config("olmoe-1b-7b")).geometry
    assert geometry.num_records == 1024
    assert geometry.expert_bytes == 12 * 2**30
    config = EngineConfig(model="olmoe-1b-7b")
    on, plan = plan_engine(geometry, config, description=MachineDescription.load(machine))
    assert on.device == "cuda"
    assert plan.fits
    assert plan.speed is not None
    assert plan.speed.slot_share == 1


def test_gemma_has_as_many_weights_as_its_name_says() -> None:
    """25.2 billion, as published: no embeddings for each layer, and one matrix for both ends."""
    geometry = build_meta(shape_config("gemma-4-26b-a4b")).geometry
    billions = (geometry.expert_bytes + geometry.resident_bytes) / 2 / 1e9
    assert billions == pytest.approx(25.2, abs=0.05)


def test_unknown_shapes_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown shape `olmoe`"):
        shape_config("olmoe")


def test_captured_steps_of_many_rows_are_planned_with_their_partial_results() -> None:
    """A step for 64 rows of OLMoE: 16 heads in 32 splits of 128 values, a maximum and a sum, FP32.

    Of the seven steps the largest holds 63 rows more than GRAPH_BYTES is for, all together 120.
    """
    geometry = build_meta(shape_config("olmoe-1b-7b")).geometry
    pools = []
    for rows in (1, 64):
        config = EngineConfig(model="olmoe-1b-7b", max_batch=rows)
        _, plan = plan_engine(geometry, config, description=MachineDescription.load("rtx-4090"))
        pools.append(plan.device["graph pools"])
        (line,) = [line for line in plan.device.lines if line.name == "graph pools"]
        of = "1 row" if rows == 1 else "1, 2, 4, 8, 16, 32 and 64 rows"
        assert line.note == f"kept by the captured decode steps of {of}"
    one_row = 4 * 16 * 32 * (128 + 2) + geometry.vocab * (2 + 4)
    assert pools == [GRAPH_BYTES, 7 * GRAPH_BYTES + 120 * one_row]


def test_a_shape_may_have_positions_for_a_longer_context() -> None:
    assert shape_config("qwen3-30b-a3b").max_position_embeddings == 40960
    longer = shape_config("qwen3-30b-a3b", context_tokens=100_352)
    assert build_meta(longer, "bfloat16").geometry.max_context == 100_352
    assert shape_config("qwen3-30b-a3b", context_tokens=512).max_position_embeddings == 40960

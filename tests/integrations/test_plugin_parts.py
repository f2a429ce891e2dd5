"""What the plugin knows without vLLM: its options, the slots of a budget, vLLM's command line."""

from __future__ import annotations

import json
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotset.checkpoint.source import resolve_model
from hotset.core.config import EngineConfig
from hotset.core.errors import CapacityError, CheckpointError, ConfigError
from hotset.core.fingerprint import ModelFingerprint
from hotset.core.geometry import ExpertSpec, Gate, GateForm, ModelGeometry, MoELayer
from hotset.core.profile import NUM_REUSE_BUCKETS, Profile
from hotset.integrations.vllm.command import Listening, command_line
from hotset.integrations.vllm.config import PluginConfig
from hotset.integrations.vllm.sizes import sizes_within
from hotset.models.describe import describe
from hotset.runtime.planning import plan_engine

EXPERT = ExpertSpec.build(
    hidden=64, intermediate=32, gate=Gate(GateForm.PLAIN), has_bias=False, dtype="bfloat16"
)
LAYERS = [MoELayer(f"layers.{index}", 8, 2, EXPERT) for index in range(3)]
RECORD = EXPERT.record_bytes


def test_options_are_read_and_checked() -> None:
    given = {"vram": "2MiB", "policy": "lru", "metrics_port": 8130}
    config = PluginConfig.of({"hotset": given, "another": 1})
    assert config == PluginConfig(vram_bytes=2 * 2**20, policy="lru", metrics_port=8130)
    config = PluginConfig.of({"hotset": {"vram": 1, "verify": True, "profile": "mine.npz"}})
    assert config == PluginConfig(vram_bytes=1, verify=True, profile="mine.npz")


@pytest.mark.parametrize("additional", [None, {}, {"another": {"vram": 1}}])
def test_without_its_name_there_is_nothing_of_hotset(additional: object) -> None:
    assert PluginConfig.of(additional) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("8GiB", "must be an object"),
        ({}, "`vram` is not set"),
        ({"vram": "8GiB", "contxt": 1}, "no option `contxt`"),
        ({"vram": "8GiB", "halflife": 1}, "did you mean `half_life`?"),
        ({"vram": "8 fish"}, "not a size"),
        ({"vram": 1, "staging": "rings"}, "`staging` is `rings`"),
        ({"vram": 1, "half_life": 0}, "the least is 0.1 steps"),
        ({"vram": 1, "metrics_port": 70000}, "from 1 to 65535"),
        ({"vram": 1, "metrics_port": True}, "from 1 to 65535"),
    ],
)
def test_wrong_options_are_named(given: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PluginConfig.of({"hotset": given})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("records", "use_ring", "slots", "ring"),
    [
        (0, False, 0, 0),
        (5, False, 5, 0),
        (24, False, 24, 0),
        (99, False, 24, 0),
        (2, True, 0, 2),
        (7, True, 5, 2),
        (24, True, 24, 0),  # with a slot for each, nothing is staged
    ],
)
def test_a_budget_is_slots_and_ring(records: int, use_ring: bool, slots: int, ring: int) -> None:
    sizes = sizes_within(LAYERS, records * RECORD + RECORD - 1, use_ring=use_ring)
    assert (sizes.pools.num_slots, sizes.staging_records) == (slots, ring)
    assert sum(sizes.slots_L) == slots
    assert max(sizes.slots_L) - min(sizes.slots_L) <= 1


def test_a_budget_below_the_ring_is_refused_with_the_least() -> None:
    with pytest.raises(CapacityError, match="the least is"):
        sizes_within(LAYERS, 2 * RECORD - 1, use_ring=True)


@cache
def pocket_geometry() -> ModelGeometry:
    return describe("pocket").geometry


POCKET = resolve_model("pocket")


def line_of(on: str = "cuda", folder: Path = POCKET, **options: Any) -> list[str]:
    settings = {"device": "cpu", "vram": "80MiB", "context": 512, "max_batch": 2} | options
    config = EngineConfig.from_options("pocket", **settings)
    _, plan = plan_engine(pocket_geometry(), config)
    listening = Listening(host="127.0.0.1", port=8000, names=("a", "b"), api_keys=("secret",))
    return command_line(str(folder), plan=plan, device=on, config=config, listening=listening)


def test_the_command_line_has_the_numbers_of_the_plan() -> None:
    line = line_of(policy="lru")
    assert line[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    values = dict(pairwise(line))
    assert values["--model"] == str(POCKET) and values["--served-model-name"] == "a"
    assert values["--max-model-len"] == "512" and values["--max-num-seqs"] == "2"
    assert int(values["--kv-cache-memory-bytes"]) > 0 and values["--api-key"] == "secret"
    hotset = json.loads(values["--additional-config"])["hotset"]
    assert hotset["policy"] == "lru" and 0 < hotset["vram"] < 80 * 2**20
    assert PluginConfig.of({"hotset": hotset}) is not None, "the plugin takes what is written"
    assert json.loads(values["--compilation-config"]) == {"cudagraph_mode": "PIECEWISE"}
    assert "--no-enable-prefix-caching" in line and "--enforce-eager" not in line
    assert "--kv-cache-dtype" not in line
    assert dict(pairwise(line_of(kv_dtype="fp8")))["--kv-cache-dtype"] == "fp8"


def test_a_profile_is_handed_on(tmp_path: Path) -> None:
    layers = pocket_geometry().layers
    num_experts = tuple(layer.num_experts for layer in layers)
    fingerprint = ModelFingerprint(
        architecture="", num_experts=num_experts, top_k=tuple(layer.top_k for layer in layers)
    )
    counts_LE = np.ones((len(layers), max(num_experts)), dtype=np.int64)
    reuse_LB = np.zeros((len(layers), NUM_REUSE_BUCKETS), dtype=np.int64)
    profile = Profile(fingerprint, counts_LE, reuse_LB, num_tokens=9, num_sequences=1)
    profile.save(tmp_path / "mine.npz")
    line = line_of(profile=str(tmp_path / "mine.npz"))
    hotset = json.loads(dict(pairwise(line))["--additional-config"])["hotset"]
    assert hotset["profile"] == str(tmp_path / "mine.npz")


def test_no_graphs_is_eager() -> None:
    line = line_of(graphs=False)
    assert "--enforce-eager" in line and "--compilation-config" not in line


def test_a_cpu_has_no_graphs_to_cut() -> None:
    line = line_of("cpu")
    assert "--enforce-eager" not in line and "--compilation-config" not in line


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"batch_invariant": True}, "--batch-invariant"),
        ({"lossless": True}, "--lossless"),
        ({"strict": True}, "--strict"),
    ],
)
def test_what_vllm_has_no_like_of_is_refused(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        line_of(**options)


def test_a_quantised_checkpoint_is_refused_before_vllm_starts(tmp_path: Path) -> None:
    config = json.loads((POCKET / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match="quantised with `fp8`"):
        line_of(folder=tmp_path)

"""BF16 experts in 12 bits through the whole engine: no bit of an answer is another one.

The same engine with plain records is the oracle, so nothing here has a tolerance.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoints import rewrite
from families import Family, make_family, text
from hotset.checkpoint.audit import audit_records
from hotset.core.config import EngineConfig
from hotset.core.errors import CheckpointError, ConfigError
from hotset.core.formats import NVFP4, PLAIN, WeightFormat
from hotset.core.lossless import with_lossless
from hotset.models.quantised import with_weights
from hotset.runtime.engine import Engine
from hotset.runtime.planning import plan_engine
from hotset.runtime.verify import placements

# In files: for each expert; of all experts, transposed, interleaved, with biases; converted.
TYPES = ("mixtral", "gpt_oss", "inkling2_text")
NUM_PROMPT, NUM_ANSWER = 24, 8


def bfloat16(model_type: str, folder: Path) -> Family:
    return make_family(model_type, folder).with_dtype("bfloat16")


def answer(engine: Engine, ids: list[int]) -> list[int]:
    steps = engine.generate_ids(ids, max_tokens=NUM_ANSWER, stop_ids=frozenset())
    return [step.token_id for step in steps]


def differences(family: Family, engine: Engine) -> list[str]:
    specs = [layer.expert for layer in engine.geometry.layers]
    return list(audit_records(family.source.keys, engine.store.fields, specs))


@pytest.mark.parametrize("model_type", TYPES)
def test_answers_are_those_of_plain_records(model_type: str, tmp_path: Path) -> None:
    family, ids = bfloat16(model_type, tmp_path), text(NUM_PROMPT)
    with family.engine() as engine:
        want_TV, want = engine.logits(ids), answer(engine, ids)
    with family.engine(lossless=True) as engine:
        for layer in engine.geometry.layers:
            assert layer.expert.up_format.is_lossless and layer.expert.down_format.is_lossless
        assert answer(engine, ids) == want
        for _, placement in placements(engine):
            engine.place(placement)
            assert torch.equal(engine.logits(ids), want_TV)
        assert not differences(family, engine)
        # The control: one weight's sign, which only bytes tell from the plain record's.
        engine.store.fields(0, 1)["down"][0, 0] ^= 0x80
        assert len(differences(family, engine)) == 1


def test_gate_and_up_are_packed_by_any_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both fill one matrix, and the table of what is rare, each its own part."""
    family = bfloat16("mixtral", tmp_path)
    for num_threads in (1, 4):
        monkeypatch.setattr("hotset.checkpoint.loader.default_threads", lambda n=num_threads: n)
        with family.engine(lossless=True) as engine:
            assert not differences(family, engine)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """A row with every exponent that there is: nothing is left out, and nothing is rounded."""
    family = bfloat16("mixtral", tmp_path)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if "experts.1." in name and name.endswith("w2.weight"))
        rows, columns = tensors[name].shape
        tensors[name] = torch.exp2(torch.linspace(-120, 0, rows * columns)).view(columns, rows).T
        tensors[name] = tensors[name].contiguous()

    rewrite(tmp_path, spoil)
    spoilt = Family(tmp_path, family.source).with_dtype("bfloat16")
    with pytest.raises(CheckpointError, match=r"experts\.1\.w2.*lossless") as refused:
        spoilt.engine(lossless=True)
    assert refused.value.hint == "leave `--lossless` out"
    with spoilt.engine() as engine:
        assert not differences(spoilt, engine)


@pytest.mark.parametrize(
    ("dtype", "weights", "why"),
    [("float32", PLAIN, "computes in float32"), ("bfloat16", NVFP4, "are quantised")],
)
def test_what_is_no_bf16_is_refused(
    dtype: str, weights: WeightFormat, why: str, tmp_path: Path
) -> None:
    family = make_family("qwen3_moe", tmp_path).with_dtype(dtype)
    geometry = with_weights(family.source.geometry, weights)
    with pytest.raises(ConfigError, match=why) as refused:
        plan_engine(geometry, EngineConfig(model="m", device="cpu", lossless=True))
    assert refused.value.option == "lossless"


def test_the_plan_counts_packed_records(tmp_path: Path) -> None:
    geometry = bfloat16("qwen3_moe", tmp_path).source.geometry
    config = EngineConfig(model="m", device="cpu", lossless=True)
    _, plan = plan_engine(geometry, config)
    packed = with_lossless(geometry, lossless=True)
    assert with_lossless(packed, lossless=True) == packed
    assert plan.host["expert arena"] == packed.expert_bytes != geometry.expert_bytes

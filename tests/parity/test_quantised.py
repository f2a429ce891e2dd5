"""Quantised checkpoints against stock transformers on dequantised weights, in FP32.

Stock transformers is no oracle for the quantised files themselves: it loads some of them wrongly
without a word. So tiny models of the families are packed by `tests/quantised.py`, and stock gets
the matrices that the codes stand for; checkpoints of the formats' own libraries come with the
log-probabilities of such a forward.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from families import Family, difference, make_family, stock_logits, text
from hotset.checkpoint.audit import audit_records
from hotset.core.errors import CheckpointError
from hotset.runtime.engine import Engine
from hotset.runtime.verify import logit_bound, placements
from hotset.runtime.weights import CheckpointWeights
from quantised import DIALECTS, E2M1, EXPERT, Dialect, fp8, int8, pairs, quantise_folder
from vocabulary import save_words

NUM_PROMPT, NUM_ANSWER = 24, 8

# Linear layers besides: attention, shared experts, dense layers.
OTHERS = re.compile(r"\.(self_attn|shared_experts?|mlp)\.\w+_proj\.weight$")

# Model type, dialect of its experts, and of its other linear layers. The layouts that each is
# published in, and over all of them every format.
FAMILIES = [
    ("glm4_moe", "int4", None),
    ("glm5_next", "nvfp4, ModelOpt", None),
    ("qwen3_next", "gptq", "gptq"),
    ("qwen3_5_moe", "fp8 blocks, bf16 scales", "fp8 blocks, bf16 scales"),
    ("deepseek_v3", "fp8 blocks", "fp8 blocks"),
    ("minimax_m2", "fp8 blocks", "fp8 blocks"),
    ("mixtral", "awq", "awq"),
    ("olmoe", "gptq, activation order", None),
    ("deepseek_v4", "mxfp4, DeepSeek", None),
    ("qwen3_moe", "nvfp4, compressed-tensors", "fp8 rows"),
    ("gemma4", "nvfp4, ModelOpt", None),  # whose library class has one tensor of all experts
]


def both(model_type: str, folder: Path, experts: Dialect, attention: Dialect | None) -> Pair:
    """A tiny model with quantised weights, and stock transformers with what they stand for."""
    plain = make_family(model_type, folder / "plain")

    def dialect_of(name: str) -> Dialect | None:
        if EXPERT.search(name):
            return experts
        return attention if OTHERS.search(name) else None

    config = dict(experts.config)
    if config["quant_method"] == "compressed-tensors":
        config["format"] = "mixed-precision" if attention else config["format"]
    quantise_folder(plain.folder, folder / "packed", dialect_of, config=config)
    stock = Family(plain.folder, CheckpointWeights(str(plain.folder), dtype="float32")).stock()
    packed = Family(folder / "packed", CheckpointWeights(str(folder / "packed"), dtype="float32"))
    return Pair(packed, stock)


@dataclass
class Pair:
    packed: Family
    stock: Any

    def greedy(self, ids: list[int]) -> list[int]:
        answer: list[int] = []
        while len(answer) < NUM_ANSWER:
            answer.append(int(stock_logits(self.stock, ids + answer)[-1].argmax()))
        return answer


def answer(engine: Engine, ids: list[int]) -> list[int]:
    steps = engine.generate_ids(ids, max_tokens=NUM_ANSWER, stop_ids=frozenset())
    return [step.token_id for step in steps]


def check(pair: Pair, *, dequantised: bool = False) -> None:
    """Logits of a text, a greedy answer, all placements, and every record."""
    ids = text(NUM_PROMPT)
    with pair.packed.engine() as engine:
        assert all(layer.expert.is_plain for layer in engine.geometry.layers) == dequantised
        want = stock_logits(pair.stock, ids)
        got = engine.logits(ids)
        assert difference(got, want) <= logit_bound(engine, want)
        assert answer(engine, ids) == pair.greedy(ids)
        for _, placement in placements(engine):
            engine.place(placement)
            assert torch.equal(engine.logits(ids), got)
        specs = [layer.expert for layer in engine.geometry.layers]
        assert not list(audit_records(pair.packed.source.keys, engine.store.fields, specs))


@pytest.mark.parametrize(("model_type", "experts", "attention"), FAMILIES)
def test_a_family_in_its_published_format(
    model_type: str, experts: str, attention: str | None, tmp_path: Path
) -> None:
    check(both(model_type, tmp_path, DIALECTS[experts], DIALECTS[attention] if attention else None))


def test_matrices_of_a_layer_need_not_have_the_same_tensors(tmp_path: Path) -> None:
    """One says its shape and the next does not; where that shape is another one, it is refused."""
    both("glm4_moe", tmp_path, DIALECTS["int4"], None)
    file = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(file)
    shapes = [name for name in tensors if name.endswith("weight_shape")]
    for name in shapes[1::2]:
        del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    source = CheckpointWeights(str(file.parent), dtype="float32")
    with Family(file.parent, source).engine() as engine:
        specs = [layer.expert for layer in engine.geometry.layers]
        assert not list(audit_records(source.keys, engine.store.fields, specs))
    tensors[shapes[-2]] += 8
    save_file(tensors, file, metadata={"format": "pt"})
    wrong = Family(file.parent, CheckpointWeights(str(file.parent), dtype="float32"))
    with pytest.raises(CheckpointError, match="`weight_shape` says"):
        wrong.engine()


@pytest.mark.parametrize("packed", [True, False])
def test_int8_is_dequantised(packed: bool, tmp_path: Path) -> None:
    """No record holds it: the weights are plain ones, of the experts and of all else."""
    dialect = int8(packed=packed, size=16 if packed else 0)
    pair = both("qwen3_moe", tmp_path, dialect, None)
    check(pair, dequantised=True)


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    """Tensors of all experts, interleaved rows, biases, a clamped gate, sinks and windows."""
    plain = make_family("gpt_oss", tmp_path / "plain")
    tensors = load_file(plain.folder / "model.safetensors")
    packed = dict(tensors)
    rng = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, columns, rows = tensors[name].shape
        groups = -(-columns // 32)
        if columns % 32:
            continue  # the layout has whole groups only
        codes = torch.randint(0, 16, (num_experts * rows, columns), generator=rng)
        scale = torch.randint(120, 124, (num_experts, rows, groups), generator=rng)
        factor = (2.0 ** (scale - 127)).float().repeat_interleave(32, -1)
        matrix = E2M1[codes].view(num_experts, rows, columns) * factor
        packed[f"{name}_blocks"] = pairs(codes).view(num_experts, rows, groups, 16)
        packed[f"{name}_scales"] = scale.to(torch.uint8)
        del packed[name]
        tensors[name] = matrix.transpose(1, 2).contiguous()
    save_file(tensors, plain.folder / "model.safetensors", metadata={"format": "pt"})
    stock = plain.stock()
    save_file(packed, plain.folder / "model.safetensors", metadata={"format": "pt"})
    path = plain.folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(config))
    source = CheckpointWeights(str(plain.folder), dtype="float32")
    check(Pair(Family(plain.folder, source), stock))


@pytest.mark.parametrize("size", [16, 24])  # in blocks of 24 gate and up share scales
def test_all_experts_in_one_tensor_of_fp8(size: int, tmp_path: Path) -> None:
    """`gate_up_proj` and `gate_up_proj_scale_inv`, as transformers holds FP8 experts."""
    plain = make_family("gemma4", tmp_path / "plain")
    config = {"quant_method": "fp8", "weight_block_size": [size, size]}
    dialect = fp8((size, size), name="scale_inv", dtype=torch.float32, **config)
    tensors = load_file(plain.folder / "model.safetensors")
    packed = dict(tensors)
    rng = torch.Generator().manual_seed(0)
    names = [name for name in tensors if name.endswith(("gate_up_proj", "experts.down_proj"))]
    assert len(names) == 2 * len(plain.source.geometry.layers)
    for name in names:
        num_experts, rows, columns = tensors[name].shape
        made = [dialect.make(rows, columns, rng) for _ in range(num_experts)]
        packed[name] = torch.stack([group["weight"] for group, _ in made])
        packed[f"{name}_scale_inv"] = torch.stack([group["scale_inv"] for group, _ in made])
        tensors[name] = torch.stack([matrix for _, matrix in made])
    save_file(tensors, plain.folder / "model.safetensors", metadata={"format": "pt"})
    stock = Family(plain.folder, CheckpointWeights(str(plain.folder), dtype="float32")).stock()
    save_file(packed, plain.folder / "model.safetensors", metadata={"format": "pt"})
    path = plain.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    source = CheckpointWeights(str(plain.folder), dtype="float32")
    assert {layer.expert.down_format.name for layer in source.geometry.layers} == {"fp8"}
    gate_up = "fp8" if size == 16 else "plain"
    assert {layer.expert.up_format.name for layer in source.geometry.layers} == {gate_up}
    check(Pair(Family(plain.folder, source), stock))


def test_layers_and_projections_in_formats_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Layer 0 INT4, layer 1 unquantised, layer 2 with a second projection in FP8, layer 3 with gate
    and up in different formats, which are dequantised and said."""
    plain = make_family("qwen3_moe", tmp_path / "plain")

    def dialect_of(name: str) -> Dialect | None:
        if not EXPERT.search(name) or ".layers.1." in name:
            return None
        apart = ".layers.2." in name and "down_proj" in name
        apart |= ".layers.3." in name and "up_proj" in name
        return DIALECTS["fp8 rows" if apart else "int4"]

    config = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    quantise_folder(plain.folder, tmp_path / "packed", dialect_of, config=config)
    source = CheckpointWeights(str(tmp_path / "packed"), dtype="float32")
    formats = [(e.expert.up_format.name, e.expert.down_format.name) for e in source.geometry.layers]
    assert formats[:3] == [("int4", "int4"), ("plain", "plain"), ("int4", "fp8")]
    if len(formats) > 3:
        assert formats[3] == ("plain", "int4")
        assert "quantised in several formats side by side" in caplog.text
    sizes = [layer.expert.record_bytes for layer in source.geometry.layers]
    assert len(set(sizes)) >= 3
    check(Pair(Family(tmp_path / "packed", source), plain.stock()))


def swap_nibbles(fields: dict[str, torch.Tensor]) -> None:
    """Of one projection; of FP8, whose codes are bytes, the same bits."""
    fields["up"].copy_((fields["up"] << 4) | (fields["up"] >> 4))


def invert_scale(fields: dict[str, torch.Tensor]) -> None:
    scale = fields["up_scale"]
    if scale.dtype == torch.uint8:  # exponents: E8M0's bias is 127, E4M3's 7 above 3 bits
        scale.copy_(torch.where(scale > 0x7E, scale, 112 - scale.clamp(max=112)))
    else:
        scale.reciprocal_()


def drop_global(fields: dict[str, torch.Tensor]) -> None:
    fields["up_global"].fill_(1.0)


@pytest.fixture(params=["fp8-block", "gpt-oss-mxfp4", "ct-int4", "modelopt-nvfp4"])
def published(request: pytest.FixtureRequest, shared: Path, tmp_path: Path) -> Iterator[Published]:
    folder = shared / "models" / "quantised" / request.param
    if not (folder / "tokenizer.json").exists():
        for path in folder.iterdir():
            (tmp_path / path.name).symlink_to(path)
        save_words(tmp_path, vocab=2048)
        folder = tmp_path
    reference = json.loads((folder / "reference.json").read_text())
    family = Family(folder, CheckpointWeights(str(folder), dtype="float32"))
    with family.engine(context_tokens=160, prefill_chunk=160) as engine:
        yield Published(engine, family, reference["prompts"][:2])


@dataclass
class Published:
    """A checkpoint that a format's own library wrote, and log-probabilities of its texts."""

    engine: Engine
    family: Family
    prompts: list[dict[str, Any]]

    def worst(self) -> tuple[float, float]:
        """How far log-probabilities are off, at most, and the bound.

        Two logits may each be off by `logit_bound` (the token's and the sum's); the file has
        rounded to 1e-5.
        """
        worsts, bounds = [], []
        for prompt in self.prompts:
            ids = prompt["prompt_ids"]
            logits_TV = self.engine.logits(ids)
            log_probs = torch.log_softmax(logits_TV.double(), dim=-1)[:-1]
            got = log_probs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            # Codes of MXFP4 are exact in BF16: there is one reference for both.
            want = torch.tensor(prompt.get("logprobs_fp32_weights") or prompt["logprobs"]).double()
            worsts.append(difference(got, want))
            bounds.append(2 * logit_bound(self.engine, logits_TV) + 1e-5)
        # Through tensors: a NaN stays one, where Python's `max` may drop it.
        return float(torch.tensor(worsts).max()), float(torch.tensor(bounds).max())


def test_a_published_checkpoint_gives_its_log_probabilities(published: Published) -> None:
    worst, bound = published.worst()
    assert worst <= bound
    for prompt in published.prompts:
        logits_TV = published.engine.logits(prompt["prompt_ids"])
        # References of top tokens are of weights rounded to BF16, so near ties may differ: where
        # the log-probabilities of both references differ, by as much.
        both = (prompt.get("logprobs_fp32_weights") or prompt["logprobs"], prompt["logprobs"])
        apart = difference(*(torch.tensor(values) for values in both))
        sure = torch.tensor(prompt["top1_gap"]) > 2 * (apart + bound)
        assert sure.any()
        assert torch.equal(logits_TV.argmax(-1)[sure], torch.tensor(prompt["top1"])[sure])


def test_a_published_checkpoint_is_the_same_in_every_placement(published: Published) -> None:
    engine, ids = published.engine, published.prompts[0]["prompt_ids"][:64]
    want = engine.logits(ids)
    for _, placement in placements(engine):
        engine.place(placement)
        assert torch.equal(engine.logits(ids), want)


def test_formats_declared_in_hf_quant_config_alone(shared: Path, tmp_path: Path) -> None:
    """Older exports of ModelOpt leave `config.json` as it was; the weights are the same."""
    folder = shared / "models" / "quantised"
    for path in (folder / "modelopt-nvfp4-hfq").iterdir():
        source = folder / "modelopt-nvfp4" if path.suffix == ".safetensors" else path.parent
        (tmp_path / path.name).symlink_to(source / path.name)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    logits = []
    for name in (folder / "modelopt-nvfp4", tmp_path):
        family = Family(name, CheckpointWeights(str(name), dtype="float32"))
        assert {layer.expert.up_format.name for layer in family.source.geometry.layers} == {"nvfp4"}
        with family.engine() as engine:
            logits.append(engine.logits(text(16)))
    assert torch.equal(*logits)


def test_wrong_nibbles_scales_and_global_scales_show(published: Published) -> None:
    """The control: one projection of one layer is read wrongly, one fault at a time."""
    engine = published.engine
    spec = engine.geometry.layers[1].expert
    specs = [layer.expert for layer in engine.geometry.layers]
    faults = [swap_nibbles, invert_scale, *([drop_global] if spec.up_format.has_global else [])]
    num_experts = engine.geometry.layers[1].num_experts
    for fault in faults:
        before = [engine.store.arena.record(1, e).clone() for e in range(num_experts)]
        fault(engine.store.fields(1, 3))
        # One expert is enough for the audit ...
        keys = published.family.source.keys
        assert len(list(audit_records(keys, engine.store.fields, specs))) == 1
        for expert in range(num_experts):
            if expert != 3:
                fault(engine.store.fields(1, expert))
        # ... and all of a layer for the log-probabilities. No slots: they hold what was right.
        engine.place(next(placements(engine))[1])
        worst, bound = published.worst()
        assert not worst <= bound, fault.__name__
        for expert, record in enumerate(before):
            engine.store.arena.record(1, expert).copy_(record)

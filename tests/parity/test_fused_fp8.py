"""All experts in one FP8 tensor, of families that store matrices [in, out]: codes of theirs are no
rows of a record, so they are dequantised and turned."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from families import Family, difference, make_family, stock_logits, text
from hotset.runtime.verify import logit_bound
from hotset.runtime.weights import CheckpointWeights


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_vl_moe"])
@pytest.mark.parametrize("size", [16, 128])
def test_transposed_experts_are_turned(family: str, size: int, tmp_path: Path) -> None:
    """Blocks that divide a matrix, and one block for all of it."""
    plain = make_family(family, tmp_path / "plain")
    quantise_experts(plain.folder, tmp_path / "packed", size)
    source = CheckpointWeights(str(tmp_path / "packed"), dtype="float32")
    assert source.geometry.layers[0].expert.down_format.is_plain
    ids = text(24)
    with Family(tmp_path / "packed", source).engine() as engine:
        got = engine.logits(ids)
        want = stock_logits(plain.stock(), ids)
        assert difference(got, want) <= logit_bound(engine, want)


def quantise_experts(plain: Path, packed: Path, size: int) -> None:
    """FP8 in blocks of the stored matrices; the plain file then holds the same weights."""
    tensors = load_file(plain / "model.safetensors")
    made, rng = dict(tensors), torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if tensor.dim() != 3 or not re.search(r"\.experts\.(gate_up|down)_proj$", name):
            continue
        experts, rows, columns = tensor.shape
        codes = (torch.randn(tensor.shape, generator=rng) * 100).to(torch.float8_e4m3fn)
        grid = (experts, -(-rows // size), -(-columns // size))
        scales = 0.0005 * (0.5 + torch.rand(grid, generator=rng))
        spread = scales.repeat_interleave(size, 1)[:, :rows].repeat_interleave(size, 2)
        tensors[name] = codes.float() * spread[:, :, :columns]
        made |= {name: codes, f"{name}_scale_inv": scales}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(plain, packed)
    save_file(made, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [size, size]}
    (packed / "config.json").write_text(json.dumps(config))

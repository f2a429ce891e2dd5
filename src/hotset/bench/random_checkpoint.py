"""A checkpoint of a given shape on disk, with random weights, for timing how it is loaded.

The experts of a layer are each other's copies: reading takes as long whatever the bytes say, and
one matrix of each kind is quantised in a moment. Written in the layout of `hotset quantize`; the
vocabulary is cut, so that what is read is experts. Knows nothing of time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PretrainedConfig

from hotset.checkpoint.rtn import TARGETS, quantise
from hotset.checkpoint.shrink import quantization_config
from hotset.checkpoint.writer import Output, Piece, write_shards
from hotset.core.geometry import MoELayer
from hotset.models.geometry import build_meta

FORMATS = ("plain", *TARGETS)
_STD = 0.02
_VOCAB = 1024


def write_random_checkpoint(
    folder: Path, config: PretrainedConfig, *, weights: str, seed: int = 0
) -> None:
    """Writes config, shards and their index into an empty folder.

    Args:
        config: the shape, of a model whose experts have no biases; its vocabulary is changed.
        weights: of experts: one of `FORMATS`.
    """
    config.get_text_config().vocab_size = _VOCAB
    config.save_pretrained(folder)
    meta = build_meta(config, "bfloat16")
    generator = torch.Generator().manual_seed(seed)
    pieces = [
        piece for layer in meta.geometry.layers for piece in _experts(layer, weights, generator)
    ]
    for name, weight in meta.model.state_dict().items():
        pieces.append(_piece({name: _random(tuple(weight.shape), generator).to(weight.dtype)}))
    write_shards(folder, pieces)
    if weights != "plain":
        values = json.loads((folder / "config.json").read_text())
        values["quantization_config"] = quantization_config(TARGETS[weights], ignored=[])
        (folder / "config.json").write_text(json.dumps(values))


def _experts(layer: MoELayer, weights: str, generator: torch.Generator) -> Iterator[Piece]:
    """Every expert's matrices under the names that tools give them which quantise layers."""
    spec = layer.expert
    shapes = {
        "gate_proj": (spec.intermediate, spec.hidden),
        "up_proj": (spec.intermediate, spec.hidden),
        "down_proj": (spec.hidden, spec.intermediate),
    }
    made = {name: _random(shape, generator) for name, shape in shapes.items()}
    tensors = {
        name: {"weight": matrix.bfloat16()} if weights == "plain" else quantise(matrix, weights)
        for name, matrix in made.items()
    }
    for expert in range(layer.num_experts):
        for name, parts in tensors.items():
            head = f"{layer.name}.{expert}.{name}"
            yield _piece({f"{head}.{suffix}": tensor for suffix, tensor in parts.items()})


def _piece(tensors: dict[str, torch.Tensor]) -> Piece:
    return Piece(
        tuple(
            Output(name, str(value.dtype).removeprefix("torch."), tuple(value.shape), value.nbytes)
            for name, value in tensors.items()
        ),
        lambda: iter(tensors.values()),
    )


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator) * _STD

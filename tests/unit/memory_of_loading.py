"""Run by `test_checkpoint_memory.py` in a process of its own: prints anonymous memory of loading.

    python memory_of_loading.py FOLDER

Loads the checkpoint that `write_checkpoint` left there twice: as hotset does, and as a control by
reading all shards before copying. Prints JSON: `arena_bytes`, and the peak growth of RssAnon of
both, arena included.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from checkpoints import meta_model, save_shards
from hotset.checkpoint.index import CheckpointIndex
from hotset.checkpoint.loader import load_experts
from hotset.checkpoint.mapping import KeyMap

NUM_SHARDS, HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_LAYERS = 8, 512, 256, 16, 3


def anonymous_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    match = re.search(r"RssAnon:\s+(\d+) kB", text)
    assert match is not None
    return int(match.group(1)) * 1024


def peak_growth(action: Callable[[], object]) -> int:
    """Most that anonymous memory grows while `action` runs, sampled every millisecond.

    What it returns is held for one last sample: on a busy machine the others may come too early.
    """
    before = peak = anonymous_bytes()
    stop = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not stop.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.001)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        held = action()
        peak = max(peak, anonymous_bytes())
        del held
    finally:
        stop.set()
        sampler.join()
    return peak - before


def write_checkpoint(folder: Path) -> None:
    """48 experts of 1.5 MiB in FP32, dealt out to 8 shards of 9 MiB.

    Not in the process that measures: its allocator would keep the memory and hide later growth.
    """
    shapes = {"gate_proj": (INTERMEDIATE, HIDDEN), "up_proj": (INTERMEDIATE, HIDDEN)}
    shapes["down_proj"] = (HIDDEN, INTERMEDIATE)
    tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight": torch.randn(shape)
        for layer in range(NUM_LAYERS)
        for expert in range(NUM_EXPERTS)
        for name, shape in shapes.items()
    }
    save_shards(folder, tensors, num_shards=NUM_SHARDS)


def main(folder: Path) -> None:
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_experts=NUM_EXPERTS,
        num_hidden_layers=NUM_LAYERS,
        vocab_size=128,
    )
    model = meta_model(config)
    index = CheckpointIndex.read(folder)
    key_map = KeyMap.build(index, model=model, params=model.hotset_params)
    record_elements = 3 * HIDDEN * INTERMEDIATE
    num_records = NUM_LAYERS * NUM_EXPERTS

    def stream() -> torch.Tensor:
        arena = torch.empty(num_records, record_elements)

        def destination(layer: int, expert: int) -> dict[str, torch.Tensor]:
            up, down = arena[layer * NUM_EXPERTS + expert].split(
                [2 * record_elements // 3, record_elements // 3]
            )
            return {
                "up": up.view(2 * INTERMEDIATE, HIDDEN),
                "down": down.view(HIDDEN, INTERMEDIATE),
            }

        load_experts(key_map, destination=destination)
        return arena

    def read_all_then_copy() -> list[torch.Tensor]:
        arena = torch.empty(num_records * record_elements)
        tensors = [t.clone() for file in index.files for t in load_file(file).values()]
        torch.cat([tensor.view(-1) for tensor in tensors], out=arena)
        return [arena, *tensors]

    print(
        json.dumps(
            {
                "arena_bytes": num_records * record_elements * 4,
                "streamed_bytes": peak_growth(stream),
                "control_bytes": peak_growth(read_all_then_copy),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))

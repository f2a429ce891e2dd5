"""Run by `test_memory.py` in a process of its own: prints what a model takes of the host's memory.

    python memory_of_a_model.py FOLDER

Loads and closes nine times, and answers. Prints JSON: peak growth of anonymous memory while loading
and what the plan says of it, growth while a long answer is generated, and what is left of it all
after each cycle.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys

from memory_of_loading import anonymous_bytes, peak_growth

import hotset

NUM_TOKENS, WARM_UP, NUM_CYCLES = 120, 20, 9


def answer(model: hotset.Model) -> int:
    """Growth of anonymous memory between the 20th and the last token."""
    early = 0
    for count, _ in enumerate(
        model.generate(token_ids=[5], max_tokens=NUM_TOKENS, stop_ids=frozenset()), start=1
    ):
        if count == WARM_UP:
            gc.collect()
            early = anonymous_bytes()
    gc.collect()
    return anonymous_bytes() - early


def main(folder: str) -> None:
    models: list[hotset.Model] = []
    options = {"device": "cpu", "context": 256, "vram": "80MiB"}
    # Imports and the library's caches are not the model's.
    with hotset.load(folder, **options) as model:
        list(model.generate(token_ids=[5], max_tokens=2))
    baseline = anonymous_bytes()
    cycles, loads, growth = [], [], 0
    for cycle in range(NUM_CYCLES):
        loads.append(peak_growth(lambda: models.append(hotset.load(folder, **options))))
        model = models.pop()
        if cycle == 0:
            growth = answer(model)
        geometry, plan = model.engine.geometry, model.plan
        model.close()
        del model
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what the allocator merely keeps is not the model's
        cycles.append(anonymous_bytes() - baseline)
    print(
        json.dumps(
            {
                "arena_bytes": plan.host["expert arena"],
                "slot_bytes": plan.device["slots"],
                "cache_bytes": plan.device["KV cache"],
                "resident_bytes": geometry.resident_bytes,
                "record_bytes": geometry.layers[0].expert.record_bytes,
                "load_peaks": loads,
                "answer_growth": growth,
                "left": cycles,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])

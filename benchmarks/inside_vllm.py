"""hotset inside vLLM against vLLM's own offload of experts: the same budget, the same routing.

    python benchmarks/inside_vllm.py moe-54m.npz benchmarks/results.jsonl

Wants vLLM and one GPU. A cut Qwen3-30B-A3B shape of random weights, a quarter of the experts on the
device in both engines, each in a process of its own. Routers of random models spread tokens evenly
and say nothing about caching, so both engines replay the same ids of a trace: two texts of 64
experts on disjoint ids, as `hotset.bench.replay` does, which cannot be imported beside versions of
transformers that vLLM asks for. `--small` runs a small shape eagerly on a CPU, to try the script:
there vLLM has no offload to compare with.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

EXPERTS, TOP_K, TRACE_EXPERTS, TRACE_TOP_K, TRACE_LAYERS = 128, 8, 64, 4, 8
MOST_STREAMS, TRACE_STEPS, PROMPT = 32, 1000, 4
ENGINES = ("uva", "hotset")
BASELINE = "vLLM's --cpu-offload-gb (UVA) with the same budget"


@dataclass(frozen=True)
class Size:
    """Of the model and of the run."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    head_dim: int
    vocab: int
    warm: int
    timed: int

    @property
    def experts_bytes(self) -> int:
        return self.layers * EXPERTS * 3 * self.hidden * self.intermediate * 2

    @property
    def case(self) -> str:
        return f"{self.layers} layers of Qwen3-30B-A3B's shape, BF16, 25% of the experts"


LARGE = Size(16, 2048, 768, 32, 128, 151936, warm=32, timed=64)
SMALL = Size(2, 256, 64, 4, 64, 1000, warm=4, timed=8)


def trace_ids(file: str, layers: int) -> torch.Tensor:
    """[L, steps, rows, K] int32; layer l replays the trace's layer l mod 8 of another text."""
    trace = np.load(file)
    texts = [trace[name][text] for name in trace.files for text in range(len(trace[name]))]
    order = np.random.default_rng(0).permutation(len(texts))
    ids = np.empty((layers, TRACE_STEPS, MOST_STREAMS, TOP_K), np.int32)
    for layer in range(layers):
        for row in range(MOST_STREAMS):
            for half in range(2):
                text = texts[order[(row + layer // TRACE_LAYERS * 2 + half) % len(texts)]]
                routed = text[:TRACE_STEPS, layer % TRACE_LAYERS].astype(np.int32)
                begin = half * TRACE_TOP_K
                ids[layer, :, row, begin : begin + TRACE_TOP_K] = routed + half * TRACE_EXPERTS
    return torch.from_numpy(ids)


class ReplayedRouter:
    """Takes the place of vLLM's router in both engines; its step lies on the device."""

    def __init__(self, table_LTRK: torch.Tensor, device: str) -> None:
        self._table, self.step = table_LTRK.to(device), torch.zeros(1, dtype=torch.long).to(device)
        self._weights = torch.full((TRACE_STEPS * MOST_STREAMS, TOP_K), 1 / TOP_K).to(device)
        self._index: dict[int, int] = {}

    def install(self) -> None:
        from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter

        def select(
            router: object, x_TH: torch.Tensor, logits: object, dtype: Any = None, **_: object
        ) -> tuple[torch.Tensor, torch.Tensor]:
            layer = self._index.setdefault(id(router), len(self._index))
            ids = self._table[layer]
            many = len(x_TH) > MOST_STREAMS
            ids = ids.flatten(0, 1) if many else ids.index_select(0, self.step)[0]
            if layer == len(self._table) - 1:
                self.step.add_(1)
            return self._weights[: len(x_TH)], ids[: len(x_TH)].to(dtype or ids.dtype)

        FusedTopKRouter.select_experts = select


def draw_experts(device: str) -> None:
    """Fills dummy experts with one draw each for both engines, on the device, where they may lie
    in host memory; everything else as vLLM does."""
    from vllm.model_executor.model_loader import dummy_loader, weight_utils

    stock, drawn = weight_utils.initialize_single_dummy_weight, set()

    def draw(param: torch.Tensor, *rest: Any, **options: Any) -> None:
        if param.ndim != 3 or len(param) != EXPERTS:
            return stock(param, *rest, **options)
        if param.data_ptr() in drawn:
            return None
        drawn.add(param.data_ptr())
        source = torch.Generator(device).manual_seed(len(drawn))
        for one in param:
            weights = torch.empty(one.shape, dtype=one.dtype, device=device)
            one.copy_(weights.uniform_(-0.05, 0.05, generator=source))
        return None

    dummy_loader.initialize_single_dummy_weight = draw


def make_engine(engine: str, size: Size, folder: str, *, small: bool) -> Any:
    config = dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_act="silu",
        num_hidden_layers=size.layers, hidden_size=size.hidden, num_experts=EXPERTS,
        moe_intermediate_size=size.intermediate, intermediate_size=4 * size.hidden,
        num_experts_per_tok=TOP_K, num_attention_heads=size.heads, num_key_value_heads=4,
        head_dim=size.head_dim, max_position_embeddings=40960, norm_topk_prob=True,
        vocab_size=size.vocab, decoder_sparse_step=1, mlp_only_layers=[], rope_theta=1e6,
        tie_word_embeddings=False, torch_dtype="bfloat16", rms_norm_eps=1e-6, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    Path(folder, "config.json").write_text(json.dumps(config))
    budget = size.experts_bytes // 4
    options: dict[str, Any] = {
        **dict(model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16"),
        **dict(max_model_len=512, max_num_seqs=MOST_STREAMS, enable_prefix_caching=False, seed=0),
    }
    if small:
        options["enforce_eager"] = True
    else:
        options["kv_cache_memory_bytes"] = 2 << 30
        options["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
    if engine == "hotset":
        options["additional_config"] = {"hotset": {"vram": budget}}
        options["worker_extension_cls"] = "hotset.integrations.vllm.worker.HotsetWorker"
        if not small:
            options["compilation_config"]["cudagraph_mode"] = "PIECEWISE"
    elif not small:
        # Below the budget by what rounding to whole parameters would take.
        options["cpu_offload_gb"] = (size.experts_bytes - budget) / 2**30 - 1e-6
        options["cpu_offload_params"] = {"w13_weight", "w2_weight"}
    from vllm import LLM

    return LLM(**options)


def tokens_per_second(llm: Any, router: ReplayedRouter, size: Size, *, streams: int) -> float:
    """Of all streams together, over the timed steps of one run from cold streams on."""
    from vllm import SamplingParams

    router.step.fill_(200 * (1 + streams % 3))
    num_tokens = size.warm + size.timed + 1
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    for row in range(streams):
        prompt = [7 + row + 3 * place for place in range(PROMPT)]
        llm.llm_engine.add_request(f"{streams}-{row}", {"prompt_token_ids": prompt}, params)
    times = []
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        times.append(time.perf_counter())
    timed = times[size.warm - 1 :][: size.timed + 1]
    return streams * (len(timed) - 1) / (timed[-1] - timed[0])


def run_one(engine: str, trace: str, out: Path, streams: list[int], *, small: bool) -> None:
    """One engine in this process; writes its rates."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    size, device = (SMALL, "cpu") if small else (LARGE, "cuda")
    if small:  # a CPU's experts route by themselves where nothing is replayed
        from hotset.integrations.vllm import cpu_routing

        cpu_routing.experts_route = lambda _: False
    router = ReplayedRouter(trace_ids(trace, size.layers), device)
    router.install()
    draw_experts(device)
    with tempfile.TemporaryDirectory() as folder:
        llm = make_engine(engine, size, folder, small=small)
    tokens_per_second(llm, router, size, streams=max(streams))  # kernels are compiled in it
    rates = {count: tokens_per_second(llm, router, size, streams=count) for count in streams}
    out.write_text(json.dumps(rates))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trace")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--engine", choices=ENGINES, help="one of the two, in this process")
    given = parser.parse_args()
    streams = [int(count) for count in given.streams.split(",")]
    if given.engine:
        run_one(given.engine, given.trace, given.rows, streams, small=given.small)
        return
    rates: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for engine in ENGINES[given.small :]:
            out = Path(folder, engine)
            again = [sys.executable, __file__, given.trace, str(out), "--engine", engine]
            again += ["--streams", given.streams, *(["--small"] if given.small else [])]
            subprocess.run(again, check=True)
            rates[engine] = json.loads(out.read_text())
    write_rows(rates, given.rows, SMALL if given.small else LARGE)


def write_rows(rates: dict[str, dict[str, float]], file: Path, size: Size) -> None:
    from hotset.bench.rows import Row, append

    rows = []
    for engine, by_streams in rates.items():
        for streams, rate in by_streams.items():
            baseline = rates["uva"][streams] if engine == "hotset" and "uva" in rates else None
            rows.append(
                Row(
                    bench="inside_vllm",
                    case=f"{size.case}, {engine}, streams: {streams}",
                    figure="tokens of all streams",
                    unit="1/s",
                    p20=rate,
                    p50=rate,
                    p80=rate,
                    repeats=1,
                    baseline=None if baseline is None else BASELINE,
                    ratio_to_baseline=None if baseline is None else rate / baseline,
                    command="python benchmarks/inside_vllm.py moe-54m.npz benchmarks/results.jsonl",
                )
            )
            sys.stdout.write(f"{rows[-1].case}: {rate:.1f} tokens/s\n")
    append(rows, file)


if __name__ == "__main__":
    main()

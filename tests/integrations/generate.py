"""Greedy tokens of one model in vLLM, with or without hotset: a job in, one JSON line out.

Run by the tests as a process. Prompts are ids, so that no tokenizer is needed.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from typing import Any

import changed
import second_node
import simulated_graphs

from hotset.core.errors import ConfigError

# One prompt that decodes at once, one with a few tokens, one that is more than a filling step.
PROMPTS = [list(range(5, 5 + length)) for length in (3, 17, 100)]


def main(job: dict[str, Any]) -> None:
    num_ranks, num_nodes = job.get("num_ranks", 1), job.get("num_nodes", 1)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if num_ranks == 1 else "1"
    if num_ranks > 1:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(num_ranks // num_nodes)))
    os.environ.update(job.get("environ", {}))
    simulated = job.get("graphs")
    if simulated is not None:
        os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"
        simulated_graphs.install()
        simulated_graphs.BREAK.get(simulated, lambda: None)()
    from vllm import LLM

    if "changed" in job:
        changed.CHANGES[job["changed"]]()  # behind vLLM's import, which imports transformers anew
    options = options_of(job)
    with second_node.started(options) if num_nodes == 2 else nullcontext():
        answer = answer_of(LLM(**options), job)
    print("\n" + json.dumps(answer))


def answer_of(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Tokens; with hotset what its workers say; what a call that the job names says."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]

    def tokens() -> list[list[int]]:
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in outputs]

    is_ours = "hotset" in job
    # vLLM runs the model to measure and to capture it.
    before = llm.collective_rpc("hotset_traffic") if is_ours else []
    answer: dict[str, Any] = {"tokens": tokens(), "graphs": simulated_graphs.counts}
    if is_ours:
        answer["traffic before"] = before
        for name in ("traffic", "summary"):
            answer[name] = llm.collective_rpc(f"hotset_{name}")
        if job.get("ask_to_verify", True):
            answer["verify"] = llm.collective_rpc("hotset_verify")
    if "call" in job:
        answer["said"] = said_by(llm, job["call"])
        answer["again"] = tokens()
    return answer


def options_of(job: dict[str, Any]) -> dict[str, Any]:
    """What vLLM is made with, of strings, numbers and objects of them."""
    options = {
        "model": job["model"],
        "dtype": job.get("dtype", "float32"),
        "max_model_len": 256,
        "max_num_seqs": 4,
        "tensor_parallel_size": job.get("num_ranks", 1),
        "skip_tokenizer_init": True,
        "enforce_eager": job.get("graphs") is None,
        **job.get("options", {}),
    }
    if "hotset" in job:
        options["additional_config"] = {"hotset": job["hotset"]}
        options["worker_extension_cls"] = "hotset.integrations.vllm.worker.HotsetWorker"
    if job.get("num_nodes", 1) == 2:
        options |= second_node.joined(rank=0)
    return options


def said_by(llm: Any, method: str) -> str:
    """What a worker's method says when it refuses; empty when it does not."""
    try:
        llm.collective_rpc(method)
    except ConfigError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

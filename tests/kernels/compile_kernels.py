"""Compiles the kernels for a GPU that need not be there, and prints facts about each as JSON.

Run as a program, outside the interpreter: `compile_kernels.py 90` for sm_90. Goes through the
real launchers, which then stop before the launch; so what is compiled is what would run.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from ptx_waits import ahead_of_wait
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from hotset.core.geometry import ExpertSpec, Gate, GateForm
from hotset.kernels import (
    combine,
    copy_kernel,
    device,
    grouping,
    match,
    moe_decode,
    moe_few,
    moe_grouped,
    moe_prompt,
    padding,
    products,
    sample,
    sample_adjust,
    sample_report,
)
from hotset.kernels.launch import token_block
from hotset.kernels.match_reference import LayerMatch
from hotset.kernels.ranges import group_ranges, sort_choices_in_one_launch
from hotset.kernels.sample_adjust_reference import Adjustments
from hotset.kernels.sample_reference import Adjusted, SampleParams

SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
OAI = Gate(GateForm.SWIGLU_OAI, limit=7.0, alpha=1.702)
SOFTCAPPED = Gate(GateForm.SOFTCAPPED, gate_cap=30.0, up_cap=30.0)


class AbsentGPU:
    """What Triton asks a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Collects every kernel that a launcher would have launched.

    Somebody watches, as vLLM does: Triton writes what a kernel is compiled for as JSON then.
    """

    def __init__(self) -> None:
        self.kernels: list[tuple[str, Any]] = []
        knobs.runtime.jit_post_compile_hook = lambda **_: None

    def launcher(self, function: JITFunction, grid: tuple[int, ...]) -> Any:
        def compile_only(*args: Any, **kwargs: Any) -> None:
            kernel = function.run(*args, grid=grid, warmup=True, **kwargs)
            self.kernels.append((function.fn.__name__, kernel))

        return compile_only

    def facts(self, case: str) -> list[dict[str, Any]]:
        rows = [_facts(case, name, kernel) for name, kernel in self.kernels]
        self.kernels.clear()
        return rows


def launch_dependently() -> None:
    """As cards do that can, though no tensor here lies on one; see `hotset.kernels.dependent`."""
    for name, module in list(sys.modules.items()):
        if name.startswith("hotset.kernels.") and hasattr(module, "dependent_launch"):
            module.dependent_launch = lambda device: {"DEPENDENT": True, "launch_pdl": True}


def _facts(case: str, name: str, kernel: Any) -> dict[str, Any]:
    ptx = kernel.asm["ptx"]
    types = kernel.src.signature.items()
    read, written = ahead_of_wait(ptx, [key for key, type_ in types if type_ != "constexpr"])
    return {
        "read_ahead": read,
        "written_ahead": written,
        "case": case,
        "kernel": name,
        "hash": kernel.hash,
        "shared_bytes": kernel.metadata.shared,
        "loads_16_bytes": len(re.findall(r"ld\.global\S*\.v4\.[bu]32", ptx)),
        "stores_16_bytes": len(re.findall(r"st\.global\S*\.v4\.[bu]32", ptx)),
        "async_copies": len(re.findall(r"cp\.async\.c[ag]\.shared\.global", ptx)),
        "async_copies_16_bytes": len(re.findall(r"cp\.async\.cg\.shared\.global.*0x10", ptx)),
        "tensor_core": len(re.findall(r"wgmma\.mma_async|mma\.sync", ptx)),
        "asynchronous_tensor_core": len(re.findall(r"wgmma\.mma_async", ptx)),
        "fused_multiply_adds": len(re.findall(r"\bfma\.", ptx)),
        "tf32": len(re.findall(r"tf32", ptx)),
    }


def experts(
    num_tokens: int,
    hidden: int,
    inter: int,
    gate: Gate,
    dtype: str,
    *,
    fill: bool = False,
    first: int = 0,
) -> None:
    """Of addresses that begin behind so many others."""
    spec = ExpertSpec.build(
        hidden=hidden, intermediate=inter, gate=gate, has_bias=gate is OAI, dtype=dtype
    )
    experts_of(spec, num_tokens, fill=fill, first=first)


def experts_of(spec: ExpertSpec, num_tokens: int, *, fill: bool, first: int = 0) -> None:
    """The kernels that such a number of tokens takes."""
    x_TH = torch.empty(num_tokens, spec.hidden, dtype=getattr(torch, spec.dtype))
    ids_TK = torch.zeros(num_tokens, 8, dtype=torch.int64)
    address_E = torch.zeros(first + 128, dtype=torch.int64)[first:]
    fill_E = address_E if fill else None
    if num_tokens == 1:
        moe_decode.one_token(x_TH, ids_TK, address_E, spec, fill_E=fill_E)
    elif num_tokens <= 8 and spec.is_plain:
        moe_few.few_tokens(x_TH, ids_TK, address_E, spec, fill_E=fill_E)
    elif num_tokens > 64 and not fill:
        ranges = group_ranges(
            ids_TK, 128, block_tokens=token_block(num_tokens, 8, 128), most_rows=4096
        )
        moe_prompt.expert_rows(
            x_TH,
            address_E,
            spec,
            ranges=ranges,
            window=(0, 128, 0, ranges.most_blocks),
            h_RI=x_TH.new_empty(ranges.most_rows, spec.intermediate),
            y_RH=torch.empty(ranges.most_rows, spec.hidden),
        )
    else:
        blocks = grouping.group_tokens(ids_TK, 128)
        moe_grouped.grouped(x_TH, ids_TK, address_E, spec, grouping=blocks, fill_E=fill_E)


def layer_match(num_experts: int, num_victims: int) -> LayerMatch:
    columns = torch.zeros(num_experts + 2, dtype=torch.int64)
    victims, admit = torch.zeros(num_victims).int(), torch.zeros(num_experts).int()
    fill, evict = torch.zeros(num_experts, dtype=torch.int64), torch.zeros(num_victims).int()
    return LayerMatch(columns, columns, victims, admit, fill, evict)


def sampling(case: Callable[..., None], dtype: torch.dtype) -> None:
    cpu, vocab = torch.device("cpu"), 151936
    logits_BV, places_B = torch.empty(2, vocab, dtype=dtype), torch.arange(2)
    greedy, asked = SampleParams.greedy(2, device=cpu), Adjustments.off(2, vocab, device=cpu)
    other = Adjusted(asked.is_on_R, logits_BV.float())
    case("sample", sample.launch_sample, logits_BV, greedy)
    case("sample", sample.launch_sample, logits_BV, greedy, rows_B=places_B, adjusted=other)
    case("sample", sample_adjust.launch_adjust, logits_BV, asked, places_B, out=other.logits_BV)
    case(
        "report",
        sample_report.launch_report,
        logits_BV,
        (places_B, asked.is_on_R),
        rows_B=places_B,
        wants_logprobs_R=asked.is_on_R,
        params=greedy,
        adjustments=asked,
        buffers=sample_report.ReportBuffers.make(2, vocab, device=cpu),
    )


def main(capability: int) -> None:
    compiled = Compiled()
    launch_dependently()
    driver.set_active(AbsentGPU(capability))
    JITFunction.__getitem__ = lambda *bound: compiled.launcher(*bound)  # noqa: PLW0108
    moe_grouped.shared_memory_bytes = lambda device: SHARED_BYTES[capability]
    plain = Gate(GateForm.PLAIN)
    rows = []

    def case(name: str, call: Any, *args: Any, **kwargs: Any) -> None:
        call(*args, **kwargs)
        rows.extend(compiled.facts(name))

    case("one token", experts, 1, 2048, 768, plain, "bfloat16")
    case("one token, fill", experts, 1, 2880, 2880, OAI, "bfloat16", fill=True)
    case("one token, odd", experts, 1, 37, 23, SOFTCAPPED, "float16")
    case("few tokens", experts, 8, 2048, 768, plain, "bfloat16", fill=True)
    case("few tokens", experts, 2, 2880, 2880, OAI, "bfloat16", fill=True)
    case("few tokens, odd", experts, 3, 37, 23, SOFTCAPPED, "float16")
    case("small batch", experts, 16, 2048, 768, plain, "bfloat16")
    case("small batch, fill", experts, 16, 2880, 2880, OAI, "bfloat16", fill=True)
    case("64 tokens, fill", experts, 64, 2048, 768, plain, "bfloat16", fill=True)
    case("small batch, odd", experts, 16, 37, 23, SOFTCAPPED, "float16")
    case("fp32", experts, 16, 2048, 768, plain, "float32")
    case("prompt", experts, 300, 2048, 768, plain, "bfloat16")
    case("prompt, anywhere", experts, 300, 2048, 768, plain, "bfloat16", first=1)
    case("long prompt", experts, 8192, 2880, 2880, OAI, "bfloat16")
    ids_TK = torch.zeros(16, 8, dtype=torch.int64)
    case("group", grouping.group_in_one_program, ids_TK, 128, 16)
    case("group", grouping.group_by_counting, ids_TK, 128, 128)
    case("group", sort_choices_in_one_launch, ids_TK, ids_TK.bfloat16(), 128)
    y_TKH = torch.empty(4, 8, 2048)
    case("combine", combine.combine, y_TKH, torch.empty(4, 8), torch.bfloat16)
    ranges = group_ranges(ids_TK[:4], 128, block_tokens=64, most_rows=256)
    window, sum_TH = (16, 80, 0, 4), torch.empty(4, 2048)
    many_sums = {"ranges": ranges, "window": window, "sum_TH": sum_TH, "out_TH": sum_TH.bfloat16()}
    case("accumulate", moe_prompt.accumulate, y_TKH[0], torch.empty(4, 8), **many_sums)
    few, many = layer_match(128, 8), layer_match(1024, 127)
    sums = {"matched": few}
    case("combine, retarget", combine.combine, y_TKH, torch.empty(4, 8), torch.half, **sums)
    sums["behind_experts"] = True
    case("combine, ahead", combine.combine, y_TKH, torch.empty(4, 8), torch.half, **sums)
    case("match", match.match, ids_TK[:1], few)
    case("match, counted", match.match, ids_TK, few, grouping=grouping.group_tokens(ids_TK, 128))
    case("match, many", match.match, ids_TK, many)
    matrices = [torch.empty(rows, 2048, dtype=torch.bfloat16) for rows in (4096, 512, 512)]
    case("products", products.launch_products, matrices[1][:2], matrices, [])
    x_TC = torch.empty(8, 2048, dtype=torch.bfloat16)
    case("products, tensor cores", products.launch_products, x_TC, matrices, [])
    odd = [torch.empty(rows, 2880, dtype=torch.bfloat16) for rows in (4096, 520)]
    x_TC = torch.empty(5, 2880, dtype=torch.bfloat16)
    case("products, tensor cores", products.launch_products, x_TC, odd, [])
    lengths_B = torch.zeros(16, dtype=torch.int32)
    case("mask of padding", padding.launch_mask_padding, ids_TK, lengths_B)
    addresses = torch.zeros(4, dtype=torch.int64)
    case("copy", copy_kernel.launch_copy, addresses, addresses, 9 * 2**20 + 128)
    for dtype in (torch.bfloat16, torch.float16):
        sampling(case, dtype)
    interpreted = device.is_interpreted(device.round_to)
    json.dump({"interpreted": interpreted, "rows": rows}, sys.stdout)


if __name__ == "__main__":
    main(capability=int(sys.argv[1]))

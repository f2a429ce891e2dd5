"""Compiles the kernels of quantised experts for a GPU that need not be there; facts as JSON.

Run as a program, outside the interpreter: `compile_packed.py 90` for sm_90. Like
`compile_kernels`, whose tools it uses: what is compiled is what would run.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from compile_kernels import (
    OAI,
    SHARED_BYTES,
    AbsentGPU,
    Compiled,
    experts_of,
    launch_dependently,
)
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from hotset.core.formats import MXFP4, NVFP4, WeightFormat, fp8, int4
from hotset.core.geometry import ExpertSpec
from hotset.kernels import dequantise_records, device, moe_grouped

# (format, H, I): of Qwen3-30B-A3B, gpt-oss, GLM-4.5-Air; and one that nothing divides
CASES: dict[str, tuple[WeightFormat, int, int]] = {
    "fp8": (fp8("bfloat16"), 2048, 768),
    "nvfp4": (NVFP4, 2048, 768),
    "mxfp4": (MXFP4, 2880, 2880),
    "int4": (int4("bfloat16", group=128), 4096, 1408),
    "int4 zeros": (int4("float16", group=32, has_zeros=True), 37, 21),
}


def spec_of(form: WeightFormat, hidden: int, inter: int) -> ExpertSpec:
    return ExpertSpec.build(
        hidden=hidden,
        intermediate=inter,
        gate=OAI,
        has_bias=True,
        dtype="bfloat16",
        weights=form,
    )


def whole_records(spec: ExpertSpec) -> None:
    """By addresses that begin on a line of 16 bytes, and by some that do not."""
    out_ND = torch.empty(4, spec.as_plain().record_bytes, dtype=torch.uint8)
    addresses = torch.zeros(5, dtype=torch.int64)
    for address_N in (addresses[:4], addresses[1:]):
        dequantise_records.dequantise_records(address_N, spec, out_ND)


def main(capability: int) -> None:
    compiled = Compiled()
    launch_dependently()
    driver.set_active(AbsentGPU(capability))
    JITFunction.__getitem__ = lambda *bound: compiled.launcher(*bound)  # noqa: PLW0108
    moe_grouped.shared_memory_bytes = lambda device: SHARED_BYTES[capability]
    rows: list[dict[str, Any]] = []

    def case(name: str, call: Any, *args: Any, **kwargs: Any) -> None:
        call(*args, **kwargs)
        extra = [
            {
                "flushes_subnormals": "ftz" in kernel.asm["ptx"],
                "hardware_fp8": "e4m3" in kernel.asm["ptx"],
            }
            for _, kernel in compiled.kernels
        ]
        facts = compiled.facts(name)
        rows.extend(fact | more for fact, more in zip(facts, extra, strict=True))

    for name, shape in CASES.items():
        spec = spec_of(*shape)
        case(f"{name}, one token", experts_of, spec, 1, fill=True)
    for name in ("fp8", "nvfp4"):
        case(f"{name}, small batch", experts_of, spec_of(*CASES[name]), 8, fill=True)
    channel = spec_of(fp8("float32", block=(1, None)), 2048, 768)
    for num_tokens in (40, 1000):  # blocks of 64 and 128 tokens
        for fill in (True, False):
            case(f"fp8 channel, {num_tokens} tokens", experts_of, channel, num_tokens, fill=fill)
    case("int4 zeros, whole records", whole_records, spec_of(*CASES["int4 zeros"]))
    json.dump({"interpreted": device.is_interpreted(device.round_to), "rows": rows}, sys.stdout)


if __name__ == "__main__":
    main(capability=int(sys.argv[1]))

"""Compiles the kernels of lossless and of plain experts for a GPU that need not be there.

Run as a program, outside the interpreter: `compile_lossless.py 90` for sm_90. Prints facts about
each as JSON, among them how the values of each sum lie in threads, which says in which order they
are added.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
from compile_kernels import SHARED_BYTES, AbsentGPU, Compiled, experts_of
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from hotset.core.formats import LOSSLESS, PLAIN, WeightFormat
from hotset.core.geometry import ExpertSpec, Gate, GateForm
from hotset.kernels import dequantise_records, device, moe_grouped

SHAPES = {"": (2048, 768), ", odd": (2880, 360)}


def spec_of(form: WeightFormat, shape: tuple[int, int]) -> ExpertSpec:
    return ExpertSpec.build(
        hidden=shape[0],
        intermediate=shape[1],
        gate=Gate(GateForm.PLAIN),
        has_bias=False,
        dtype="bfloat16",
        weights=form,
    )


def whole_records(spec: ExpertSpec) -> None:
    out_ND = torch.empty(4, spec.as_plain().record_bytes, dtype=torch.uint8)
    dequantise_records.dequantise_records(torch.zeros(4, dtype=torch.int64), spec, out_ND)


def sums(ttgir: str) -> list[str]:
    """Shape and layout of what each reduction of a kernel adds up."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    found = re.findall(r'"tt\.reduce".*?\}\) : \((tensor<[^()]*?>)\) ->', ttgir, re.DOTALL)
    return [re.sub(r"#\w+", lambda name: layouts[name.group()], one) for one in found]


def main(capability: int) -> None:
    compiled = Compiled()
    driver.set_active(AbsentGPU(capability))
    JITFunction.__getitem__ = lambda *bound: compiled.launcher(*bound)  # noqa: PLW0108
    moe_grouped.shared_memory_bytes = lambda device: SHARED_BYTES[capability]
    rows: list[dict[str, Any]] = []

    def case(name: str, call: Any, *args: Any, **kwargs: Any) -> None:
        call(*args, **kwargs)
        kernels = [kernel for _, kernel in compiled.kernels]
        for fact, kernel in zip(compiled.facts(name), kernels, strict=True):
            rows.append(fact | {"sums": sums(kernel.asm["ttgir"])})

    for form in (PLAIN, LOSSLESS):
        for suffix, shape in SHAPES.items():
            for fill in (False, True):
                filling = ", fill" if fill else ""
                name = f"{form.name}, one token{filling}{suffix}"
                case(name, experts_of, spec_of(form, shape), 1, fill=fill)
    lossless = spec_of(LOSSLESS, SHAPES[""])
    for num_tokens in (8, 40, 1000):
        case(f"lossless, {num_tokens} tokens", experts_of, lossless, num_tokens, fill=True)
    case("lossless, whole records", whole_records, lossless)
    json.dump({"interpreted": device.is_interpreted(device.round_to), "rows": rows}, sys.stdout)


if __name__ == "__main__":
    main(capability=int(sys.argv[1]))

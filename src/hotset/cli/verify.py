"""`hotset verify`: loads a model with poisoned free slots and checks it from end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotset.cli.options import (
    Context,
    Device,
    Dtype,
    Json,
    KernelsOption,
    Lossless,
    ModelArgument,
    PrefillChunk,
    Ram,
    Revision,
    Vram,
    engine_config,
    named_by_flag,
)
from hotset.cli.progress import loading_bar
from hotset.cli.text import read_text
from hotset.core.lossless import with_lossless
from hotset.core.units import GIB, format_bytes

if TYPE_CHECKING:
    from hotset.core.config import EngineConfig
    from hotset.runtime.verify import Check
    from hotset.runtime.weights import CheckpointWeights

# Enough positions for every chunk border and expert, little enough for a CPU.
_NUM_TOKENS = 256


def verify(  # noqa: PLR0913 - one parameter for each flag
    model: ModelArgument,
    *,
    vram: Vram = None,
    ram: Ram = None,
    device: Device = None,
    dtype: Dtype = None,
    context: Context = None,
    prefill_chunk: PrefillChunk = None,
    lossless: Lossless = False,
    kernels: KernelsOption = None,
    revision: Revision = None,
    text: Annotated[
        Path | None, typer.Option(help="A text to run; default a short one in the package.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that records, slots, placements and results are right; exit code 0 yes, 1 no.

    Free slots hold NaN meanwhile. On a CPU without `--vram`, slots for half of the experts are
    used, so that there is something to check.

    Example: `hotset verify Qwen/Qwen3-30B-A3B --vram 16GiB`
    """
    config = engine_config(
        model,
        vram=vram,
        ram=ram,
        device=device,
        dtype=dtype,
        context=context,
        prefill_chunk=prefill_chunk,
        lossless=lossless,
        kernels=kernels,
        revision=revision,
        poison=True,
    )
    sample = _read_text(text)
    from hotset.runtime.engine import Engine
    from hotset.runtime.verify import verify as run
    from hotset.runtime.weights import CheckpointWeights

    source = CheckpointWeights(model, dtype=config.dtype, revision=config.revision)
    config = _with_slots(config, source)
    ids = _encode(source, sample, text)
    checks = []
    with loading_bar() as progress:
        engine = Engine(source, config, progress=progress)
    with engine:
        for check in run(engine, source, ids, stock=_stock_fits(source)):
            checks.append(check)
            if not as_json:
                typer.echo(_line(check))
    ok = all(check.ok is not False for check in checks)
    verdict = "verified" if ok else "NOT verified"
    report = {"ok": ok, "checks": [check.to_dict() for check in checks]}
    typer.echo(json.dumps(report) if as_json else verdict)
    raise typer.Exit(0 if ok else 1)


def _line(check: Check) -> str:
    mark = {True: "ok", False: "WRONG", None: "not checked"}[check.ok]
    return f"{check.name}: {mark} ({check.detail})"


def _read_text(file: Path | None) -> str:
    if file is None:
        return (resources.files("hotset") / "data" / "verify.txt").read_text(encoding="utf-8")
    return read_text(file, flag="--text")


def _encode(source: CheckpointWeights, sample: str, file: Path | None) -> list[int]:
    """Its first tokens.

    Raises:
        ConfigError: they are too few.
    """
    from hotset.runtime.verify import require_text

    ids = source.text.encode(sample)[:_NUM_TOKENS]
    with named_by_flag():
        require_text(ids, "the text" if file is None else f"`--text {file}`")
    return ids


def _with_slots(config: EngineConfig, source: CheckpointWeights) -> EngineConfig:
    """On a CPU without a budget: one that gives slots to half of the experts."""
    from hotset.runtime.planning import plan_engine
    from hotset.runtime.probe import choose_device

    if config.vram_bytes is not None or choose_device(config.device).type != "cpu":
        return config
    _, plan = plan_engine(source.geometry, config)
    geometry = with_lossless(source.geometry, config.lossless)
    vram_bytes = plan.device.total_bytes + geometry.expert_bytes // 2
    typer.echo(
        f"using `--vram {format_bytes(vram_bytes)}`: slots for half of the experts", err=True
    )
    # A plan with a budget would share it between slots, context and chunk anew.
    return replace(
        config,
        vram_bytes=vram_bytes,
        context_tokens=plan.context_tokens,
        prefill_chunk=plan.prefill_chunk,
    )


def _stock_fits(source: CheckpointWeights) -> bool:
    """Whether the whole model in FP32 fits the host memory beside our own copy."""
    from hotset.core.hardware import HostMemory

    geometry = source.geometry
    element = {"float32": 4, "bfloat16": 2, "float16": 2}[geometry.dtype]
    plain = sum(
        layer.num_experts * layer.expert.as_plain().record_bytes for layer in geometry.layers
    )
    in_fp32 = (geometry.resident_bytes + plain) * 4 // element
    ours = geometry.expert_bytes * 2 + geometry.resident_bytes
    return in_fp32 + ours + GIB < HostMemory.read().available_bytes

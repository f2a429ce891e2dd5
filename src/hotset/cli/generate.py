"""`hotset generate`: loads a model and streams one answer to stdout. A thin layer over the API.

What is wrong with a request is said before weights are read.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.cli.options import (
    Compiled,
    Context,
    Device,
    Dtype,
    Graphs,
    HalfLifeOption,
    Json,
    KernelsOption,
    KvDtype,
    Lossless,
    ModelArgument,
    PolicyOption,
    PrefillChunk,
    ProfileOption,
    Ram,
    RecordOption,
    Revision,
    Strict,
    Vram,
    WorkloadOption,
    engine_config,
    named_by_flag,
)
from hotset.cli.outputs import check_apart, check_writable
from hotset.cli.progress import loading_bar
from hotset.cli.sampling import (
    FrequencyPenalty,
    LogitBias,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
    chosen_sampling,
)
from hotset.cli.text import amount, read_text
from hotset.core.errors import ConfigError
from hotset.core.request import SamplingParams, check_length, check_max_tokens
from hotset.core.units import format_bytes

if TYPE_CHECKING:
    from hotset.api import Model, Stats, Token
    from hotset.core.config import EngineConfig
    from hotset.core.hardware import Machine
    from hotset.core.plan import MemoryPlan
    from hotset.runtime.engine import Engine
    from hotset.runtime.weights import CheckpointWeights

# Most new tokens where nobody said how many; fewer where the context leaves fewer.
DEFAULT_MAX_TOKENS = 256

MaxTokens = Annotated[
    int | None,
    typer.Option(
        help=f"Most tokens to generate. Default: {DEFAULT_MAX_TOKENS}, or what the context leaves."
    ),
]
Chat = Annotated[bool, typer.Option("--chat", help="Send the prompt through the chat template.")]
PromptFile = Annotated[
    Path | None, typer.Option(help="Read the prompt from a file, `-` for stdin.")
]


def generate(  # noqa: PLR0913 - one parameter for each flag
    model: ModelArgument,
    prompt: Annotated[str | None, typer.Argument(metavar="TEXT", help="The prompt.")] = None,
    *,
    vram: Vram = None,
    ram: Ram = None,
    device: Device = None,
    dtype: Dtype = None,
    context: Context = None,
    prefill_chunk: PrefillChunk = None,
    workload: WorkloadOption = None,
    kv_dtype: KvDtype = None,
    lossless: Lossless = False,
    kernels: KernelsOption = None,
    revision: Revision = None,
    strict: Strict = False,
    policy: PolicyOption = None,
    half_life: HalfLifeOption = None,
    profile: ProfileOption = None,
    record: RecordOption = None,
    graphs: Graphs = True,
    compiled: Compiled = True,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    repetition_penalty: RepetitionPenalty = None,
    logit_bias: LogitBias = None,
    chat: Chat = False,
    prompt_file: PromptFile = None,
    as_json: Json = False,
) -> None:
    """Generate text: the answer streams to stdout, everything else goes to stderr.

    Example: `hotset generate Qwen/Qwen3-30B-A3B --vram 16GiB --chat "Why is the sky blue?"`
    """
    config = engine_config(
        model,
        vram=vram,
        ram=ram,
        device=device,
        dtype=dtype,
        context=context,
        prefill_chunk=prefill_chunk,
        workload=workload,
        kv_dtype=kv_dtype,
        lossless=lossless,
        kernels=kernels,
        revision=revision,
        strict=strict,
        policy=policy,
        half_life=half_life,
        profile=profile,
        graphs=graphs,
        compiled=compiled,
    )
    sampling = chosen_sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=logit_bias,
    )
    with named_by_flag():
        check_max_tokens(max_tokens)
    text = _prompt(prompt, prompt_file)
    check_apart({"--record": record}, [("--prompt-file", prompt_file)])
    check_writable(record, flag="--record")
    from hotset.api import Model
    from hotset.runtime.engine import Engine
    from hotset.runtime.weights import CheckpointWeights

    source = CheckpointWeights(model, dtype=config.dtype, revision=config.revision)
    with named_by_flag():
        ids = _encode(source, text, chat=chat)
        SamplingParams(**sampling).check_vocab(source.geometry.vocab)
        planned = _plan_for(source, config, len(ids), max_tokens)
    with loading_bar() as progress:
        engine = Engine(source, config, planned=planned, progress=progress)
    with Model(engine) as loaded, _recording(engine, record):
        room = loaded.plan.context_tokens - len(ids)
        most = min(DEFAULT_MAX_TOKENS, max(1, room)) if max_tokens is None else max_tokens
        tokens = loaded.generate(token_ids=ids, max_tokens=most, **sampling)
        with _warnings_behind():
            result = _run(tokens, echo=None if as_json else _write)
            if not as_json:
                typer.echo()
        stats = loaded.stats
        if as_json:
            checks = [check.to_dict() for check in loaded.self_check()]
            typer.echo(
                json.dumps(
                    {**result, "stats": stats.to_dict(), "self_check": checks}, ensure_ascii=False
                )
            )
        _say_costs(loaded, stats)


def _recording(engine: Engine, file: Path | None) -> AbstractContextManager[object]:
    from hotset.runtime.profiling import record_engine

    return nullcontext() if file is None else record_engine(engine, file)


def _prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise ConfigError(
            "give either a prompt or `--prompt-file`",
            hint='`hotset generate pocket "Once upon a time"`',
        )
    if prompt is not None:
        return prompt
    assert file is not None
    return read_text(file, flag="--prompt-file")


def _encode(source: CheckpointWeights, text: str, *, chat: bool) -> list[int]:
    if chat:
        return source.text.encode_chat([{"role": "user", "content": text}])
    return source.text.encode(text)


def _plan_for(
    source: CheckpointWeights, config: EngineConfig, num_prompt: int, max_tokens: int | None
) -> tuple[Machine, MemoryPlan]:
    """The machine and the plan; refuses a request that the plan's context cannot hold."""
    from hotset.runtime.planning import plan_engine

    machine, plan = plan_engine(source.geometry, config)
    check_length(num_prompt, max_tokens, plan.require_fit().context_tokens)
    return machine, plan


def _run(tokens: Iterator[Token], *, echo: Callable[[str], None] | None) -> dict[str, Any]:
    """Drains an answer; puts its text out as it comes where `echo` is given."""
    pieces, ids, reason = [], [], None
    for token in tokens:
        pieces.append(token.text)
        ids.append(token.token_id)
        reason = token.finish_reason
        if echo is not None:
            echo(token.text)
    assert reason is not None
    return {"text": "".join(pieces), "token_ids": ids, "finish_reason": reason.value}


@contextmanager
def _warnings_behind() -> Iterator[None]:
    """Within the block what is logged waits for its end, so that it breaks up no line of an
    answer."""
    log, held = logging.getLogger("hotset"), MemoryHandler(sys.maxsize, sys.maxsize)
    handlers, propagate = log.handlers, log.propagate
    log.handlers, log.propagate = [held], False
    try:
        yield
    finally:
        log.handlers, log.propagate = handlers, propagate
        for record in held.buffer:
            log.handle(record)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say_costs(model: Model, stats: Stats) -> None:
    plan = model.plan
    # Speed and hits are counted from the second token on.
    measured = stats.num_tokens > 1
    speed = f"{stats.tokens_per_second:.1f}" if measured else "n/a"
    hit_rate = f"{stats.hit_rate:.3f}" if measured else "n/a"
    link = format_bytes(stats.link_bytes_per_token) if measured else "n/a"
    parts = [
        f"{amount(stats.num_tokens, 'token')} at {speed} tokens/s "
        f"(first after {stats.first_token_seconds:.2f} s)",
        f"hit rate {hit_rate}",
        f"{link} over the link per token",
        amount(stats.num_slots, "slot"),
        f"peak VRAM {format_bytes(stats.device_peak_bytes)}, "
        f"RSS {format_bytes(stats.host_peak_bytes)}",
    ]
    typer.echo(" | ".join(parts), err=True)
    host = f"host: planned {format_bytes(plan.host.total_bytes)}, "
    host += f"peak RSS {format_bytes(stats.host_peak_bytes)}"
    if stats.device_peak_bytes:
        host = (
            f"device: planned {format_bytes(plan.device.total_bytes)}, "
            f"peak {format_bytes(stats.device_peak_bytes)}; {host}"
        )
    typer.echo(host, err=True)
    for check in model.self_check():
        if not check.is_right:
            typer.echo(f"warning: not as planned: {check}", err=True)
    if model.engine.drift is not None:
        drift = model.engine.drift.report()
        typer.echo(
            f"profile: its hot set hits {drift.seen:.3f} of this text, {drift.expected:.3f} of its "
            f"own; blindly {drift.blind:.3f}",
            err=True,
        )

"""`hotset serve`: loads a model and answers HTTP until a signal. A thin layer over the server.

The port is taken before weights are read, so that one in use is refused at once.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from hotset.cli.options import (
    BatchInvariant,
    Compiled,
    Context,
    Device,
    Dtype,
    Graphs,
    HalfLifeOption,
    Json,
    KernelsOption,
    KvDtype,
    KvTokens,
    Lossless,
    MaxBatch,
    ModelArgument,
    PolicyOption,
    PrefillChunk,
    PrefillShare,
    PrefixReuse,
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
from hotset.cli.outputs import check_writable
from hotset.cli.progress import loading_bar
from hotset.core import env
from hotset.core.config import EngineConfig
from hotset.core.errors import ConfigError
from hotset.server.config import ServerConfig

if TYPE_CHECKING:
    import socket

logger = logging.getLogger(__name__)

_DEFAULT = ServerConfig()

Host = Annotated[
    str, typer.Option(help="Address to listen on; `0.0.0.0` is every network of this machine.")
]
Port = Annotated[int, typer.Option(help="TCP port; 0 takes a free one.")]
ServedNames = Annotated[
    list[str] | None,
    typer.Option(help="What requests call the model; may be repeated. Default: MODEL's name."),
]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        help="Key that requests must send; may be repeated. Default: HOTSET_API_KEY, or none."
    ),
]
CorsOrigins = Annotated[
    list[str] | None,
    typer.Option(help="Web origin that browsers may call from; may be repeated. Default: none."),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        help="Further host name that requests may use while listening on a loopback address, "
        "e.g. that of a reverse proxy; may be repeated."
    ),
]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        help="`hotset`, or `vllm`: start vLLM's server with hotset's experts, sized by the plan.",
    ),
]
MaxWaiting = Annotated[
    int, typer.Option(help="Requests beyond these are refused while they wait for a row.")
]


def serve(  # noqa: PLR0913 - one parameter for each flag
    model: ModelArgument,
    *,
    host: Host = _DEFAULT.host,
    port: Port = _DEFAULT.port,
    served_name: ServedNames = None,
    api_key: ApiKeys = None,
    cors_origin: CorsOrigins = None,
    allowed_host: AllowedHosts = None,
    max_batch: MaxBatch = 8,
    max_waiting: MaxWaiting = _DEFAULT.max_waiting,
    kv_tokens: KvTokens = None,
    kv_dtype: KvDtype = None,
    lossless: Lossless = False,
    batch_invariant: BatchInvariant = False,
    prefix_reuse: PrefixReuse = True,
    prefill_share: PrefillShare = EngineConfig.prefill_share,
    vram: Vram = None,
    ram: Ram = None,
    device: Device = None,
    dtype: Dtype = None,
    context: Context = None,
    prefill_chunk: PrefillChunk = None,
    workload: WorkloadOption = None,
    kernels: KernelsOption = None,
    revision: Revision = None,
    strict: Strict = False,
    policy: PolicyOption = None,
    half_life: HalfLifeOption = None,
    profile: ProfileOption = None,
    record: RecordOption = None,
    graphs: Graphs = True,
    compiled: Compiled = True,
    engine: EngineName = "hotset",
    as_json: Json = False,
) -> None:
    """Serve a model over HTTP, under OpenAI's and Anthropic's API names.

    SIGTERM finishes what runs and ends; a second one ends at once. With `--json`, one JSON object
    on stdout says when requests can come, and where.

    Example: `hotset serve Qwen/Qwen3-30B-A3B --vram 16GiB --port 8000`
    """
    engine_settings = engine_config(
        model,
        vram=vram,
        ram=ram,
        device=device,
        dtype=dtype,
        context=context,
        prefill_chunk=prefill_chunk,
        workload=workload,
        kernels=kernels,
        revision=revision,
        strict=strict,
        policy=policy,
        half_life=half_life,
        profile=profile,
        graphs=graphs,
        compiled=compiled,
        max_batch=max_batch,
        kv_tokens=kv_tokens,
        kv_dtype=kv_dtype,
        lossless=lossless,
        batch_invariant=batch_invariant,
        prefix_reuse=prefix_reuse,
        prefill_share=prefill_share,
    )
    from hotset.server.bind import bind

    with named_by_flag():
        server_settings = ServerConfig(
            host=host,
            port=port,
            names=tuple(served_name or [_name_of(model)]),
            api_keys=_api_keys(api_key),
            cors_origins=tuple(cors_origin or ()),
            allowed_hosts=tuple(allowed_host or ()),
            max_waiting=max_waiting,
        )
        if engine != "hotset":
            _become(engine, engine_settings, server_settings, record=record, as_json=as_json)
        check_writable(record, flag="--record")
        bound = bind(server_settings)
    with bound:
        _serve(engine_settings, server_settings, bound, record=record, as_json=as_json)


def _serve(
    engine_settings: EngineConfig,
    server_settings: ServerConfig,
    bound: socket.socket,
    *,
    record: Path | None,
    as_json: bool,
) -> None:
    from hotset.runtime.engine import Engine
    from hotset.runtime.profiling import record_engine
    from hotset.runtime.weights import CheckpointWeights
    from hotset.server.run import serve as run
    from hotset.server.served import Served

    if env.LOG_LEVEL.get() is None:  # a server says one line for each request
        logging.getLogger("hotset").setLevel(logging.INFO)
    if not server_settings.loopback and not server_settings.api_keys:
        logger.warning("anyone who reaches this machine may use the model: `--api-key` asks first")

    def ready(url: str) -> None:
        name = server_settings.names[0]
        typer.echo(f"{name} is served at {url}/v1", err=True)
        if as_json:
            typer.echo(json.dumps({"url": url, "model": name, "pid": os.getpid()}))
            sys.stdout.flush()

    config = engine_settings
    source = CheckpointWeights(config.model, dtype=config.dtype, revision=config.revision)
    with loading_bar() as progress:
        engine = Engine(source, config, progress=progress)
    with (
        engine,
        nullcontext() if record is None else record_engine(engine, record),
        engine.scheduling(max_waiting=server_settings.max_waiting) as scheduler,
    ):
        served = Served.of_engine(engine, scheduler, server_settings.names)
        run(served, server_settings, bound, ready=ready)


def _become(
    name: str,
    engine_settings: EngineConfig,
    server_settings: ServerConfig,
    *,
    record: Path | None,
    as_json: bool,
) -> NoReturn:
    """Plans, prints vLLM's command line on stderr, and goes on as that process."""
    if name != "vllm":
        raise ConfigError(f"`engine` is `{name}`", hint="one of hotset, vllm", option="engine")
    if record is not None or as_json or server_settings.allowed_hosts:
        what = "--record" if record else "--json" if as_json else "--allowed-host"
        raise ConfigError(f"`{what}` has no like in vLLM", hint="leave it or `--engine` out")
    from hotset.checkpoint.source import resolve_model
    from hotset.integrations.vllm.command import Listening, command_line, require_installed
    from hotset.models.describe import describe
    from hotset.runtime.planning import plan_engine

    require_installed()
    config = engine_settings
    folder = resolve_model(config.model, config.revision)
    machine, plan = plan_engine(describe(config.model, config.dtype).geometry, config)
    listening = Listening(
        host=server_settings.host,
        port=server_settings.port,
        names=server_settings.names,
        api_keys=server_settings.api_keys,
        cors_origins=server_settings.cors_origins,
    )
    line = command_line(
        str(folder),
        plan=plan.require_fit(),
        device=machine.device,
        config=config,
        listening=listening,
    )
    hidden = ("***" if part in listening.api_keys else part for part in line)
    typer.echo(shlex.join(hidden), err=True)
    os.execv(line[0], line)


def _api_keys(given: list[str] | None) -> tuple[str, ...]:
    """Those of the command line, or else the one of the environment."""
    if given:
        return tuple(given)
    key = env.API_KEY.get()
    return () if key is None else (key,)


def _name_of(model: str) -> str:
    """A Hub id as it is, a folder by its name."""
    folder = Path(model)
    return folder.resolve().name if folder.is_dir() else model

"""`hotset heat`: a picture of which experts are used and which have a slot.

Fetches or replays, and hands on; the figures are `core.heat`'s.
"""

from __future__ import annotations

import json
from http.client import HTTPException
from pathlib import Path
from typing import Annotated
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

import typer

from hotset.cli.ask_server import key_hint, open_page
from hotset.cli.options import Json, named_by_flag
from hotset.cli.plotting import check_plot_path
from hotset.core import env
from hotset.core.errors import ConfigError, HardwareError
from hotset.core.heat import HeatMap
from hotset.core.policy import DEFAULT_HALF_LIFE
from hotset.core.trace import load_trace

PAGE = "/hotset/heat"
_TIMEOUT_SECONDS = 10


def heat(
    source: Annotated[
        str, typer.Argument(metavar="TRACE|URL", help="A trace, `pocket`, or a server's address.")
    ],
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Picture to write, .png or .svg.")
    ] = None,
    slots: Annotated[
        float | None, typer.Option(help="Of a trace: share of experts with a slot. Default: 0.25.")
    ] = None,
    half_life: Annotated[
        float | None, typer.Option("--half-life", help="Of a trace: steps. Default: 16.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Of a server. Default: HOTSET_API_KEY, or none.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw how often each expert of each layer is used, and how long it has a slot.

    A trace is replayed under policy `half-life`; a running server is asked for its counts and for
    who has a slot now.

    Example: `hotset heat pocket --slots 0.25 -o heat.png`
    """
    if output is None and not as_json:
        raise ConfigError("there is nothing to write", hint="give `-o heat.png`, or `--json`")
    if output is not None:
        check_plot_path(output, flag="--output")
    with named_by_flag():
        found = _heat_of(source, slots=slots, half_life=half_life, api_key=api_key)
    if output is not None:
        from hotset.cli.heat_plot import draw_heat

        draw_heat(found, output)
    if as_json:
        typer.echo(json.dumps(found.to_dict()))


def _heat_of(
    source: str, *, slots: float | None, half_life: float | None, api_key: str | None
) -> HeatMap:
    if not source.startswith(("http://", "https://")):
        if api_key is not None:
            raise ConfigError("`--api-key` is for a server's address, not for a trace")
        return HeatMap.from_trace(
            load_trace(source),
            slots=0.25 if slots is None else slots,
            half_life=DEFAULT_HALF_LIFE if half_life is None else half_life,
        )
    if slots is not None or half_life is not None:
        raise ConfigError("`--slots` and `--half-life` are a server's own", hint="leave them out")
    return fetch_heat(source, api_key=api_key or env.API_KEY.get())


def fetch_heat(url: str, *, api_key: str | None = None) -> HeatMap:
    """What a server says at `/hotset/heat`.

    Args:
        url: of the server, or of the page itself.
        api_key: that it asks for.

    Raises:
        HardwareError: it does not answer, or refuses.
        ConfigError: what it answers is something else.
    """
    page = url if urlsplit(url).path.endswith(PAGE) else url.rstrip("/") + PAGE
    try:
        with open_page(page, api_key=api_key, seconds=_TIMEOUT_SECONDS) as answer:
            data = json.load(answer)
    except HTTPError as error:
        raise HardwareError(
            f"`{page}` refuses: {error.code} {error.reason}", hint=key_hint(error)
        ) from error
    except (URLError, OSError, HTTPException) as error:
        raise HardwareError(
            f"`{page}` does not answer: {getattr(error, 'reason', error)}",
            hint="is `hotset serve` running there?",
        ) from error
    except ValueError as error:
        raise ConfigError(f"`{page}` is not JSON: {error}") from error
    return HeatMap.from_json(data, name=url)

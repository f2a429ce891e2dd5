"""`hotset profile`: makes routing profiles and reads them.

`hotset profile MODEL ...` makes one, as `hotset profile make MODEL ...` does; `show`, `diff`,
`merge` and `score` work on files and load no model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hotset.cli.lists import read_shares
from hotset.cli.options import Json
from hotset.cli.profile_make import make, output_path, save_profile
from hotset.cli.text import amount
from hotset.core.errors import ConfigError
from hotset.core.policy import StaticGlobal, StaticUniform
from hotset.core.profile import Profile
from hotset.core.trace import PARITIES, load_trace

DEFAULT_SLOTS = "0.125,0.25,0.5"


class _MakesByDefault(typer.core.TyperGroup):
    """A first word that is no command is a model: `profile MODEL` is `profile make MODEL`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = args[0] in self.commands or args[0].startswith("-")
        return super().resolve_command(ctx, args if known else ["make", *args])


app = typer.Typer(
    cls=_MakesByDefault,
    no_args_is_help=True,
    help="Record what a model routes, and read such profiles. `hotset profile MODEL ...` is short "
    "for `hotset profile make MODEL ...`.",
)

ProfileFile = Annotated[Path, typer.Argument(metavar="PROFILE", help="A profile file.")]
Slots = Annotated[
    str, typer.Option(help="Fractions of the experts that have a slot, separated by commas.")
]
app.command()(make)


@app.command()
def show(
    profile: ProfileFile,
    *,
    slots: Slots = DEFAULT_SLOTS,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the coverage curves into a .png or .svg file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print how uneven a model's use of its experts is, and what a hot set of them covers.

    Example: `hotset profile show notes.npz --plot coverage.svg`
    """
    from hotset.cli.plotting import check_plot_path
    from hotset.cli.profile_output import print_profile, profile_data
    from hotset.cli.profile_plot import draw_coverage

    if plot is not None:
        check_plot_path(plot)
    fractions = read_shares(slots, "--slots")
    loaded = Profile.load(profile)
    if plot is not None:
        draw_coverage(loaded, plot)
    if as_json:
        typer.echo(json.dumps(profile_data(loaded, fractions)))
    else:
        print_profile(loaded, fractions, title=str(profile))


@app.command()
def diff(
    first: ProfileFile,
    second: Annotated[Path, typer.Argument(metavar="OTHER", help="One of the same model.")],
    *,
    slots: Slots = DEFAULT_SLOTS,
    as_json: Json = False,
) -> None:
    """Print how differently two texts use the same model.

    Example: `hotset profile diff german.npz code.npz --slots 0.25`
    """
    from hotset.cli.profile_output import diff_data, print_diff

    fractions = read_shares(slots, "--slots")
    profiles = Profile.load(first), Profile.load(second)
    profiles[1].check_fits(profiles[0].fingerprint, name=f"profile `{second}`")
    differences = [profiles[0].diff(profiles[1], slots=fraction) for fraction in fractions]
    if as_json:
        typer.echo(json.dumps(diff_data(differences)))
    else:
        print_diff(differences, names=(str(first), str(second)))


@app.command()
def merge(
    profiles: Annotated[
        list[Path], typer.Argument(metavar="PROFILES...", help="Two or more of one model.")
    ],
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="NAME", help="Profile to write.")
    ],
    as_json: Json = False,
) -> None:
    """Join profiles of one model into one, as if all texts had been recorded together.

    A forecast cannot be joined: record the texts together for one.

    Example: `hotset profile merge german.npz code.npz -o all.json`
    """
    path = output_path(output)
    if len(profiles) < 2:
        raise ConfigError("one profile is nothing to merge", hint="give two or more")
    first, *others = [Profile.load(file) for file in profiles]
    for file, other in zip(profiles[1:], others, strict=True):
        other.check_fits(first.fingerprint, name=f"profile `{file}`")
    merged = first.merge(others)
    save_profile(merged, path)
    if any(profile.forecast is not None for profile in (first, *others)):
        typer.echo("the merged profile has no forecast: that is fitted to a trace", err=True)
    if as_json:
        data = {"profile": str(path), "tokens": merged.num_tokens, "sources": len(profiles)}
        typer.echo(json.dumps(data))
    else:
        typer.echo(f"{path}: {amount(merged.num_tokens, 'token')} of {len(profiles)} profiles")


@app.command()
def score(
    profile: ProfileFile,
    trace: Annotated[
        Path,
        typer.Argument(metavar="TRACE", help="Trace of other text (see `hotset profile --trace`)."),
    ],
    *,
    slots: Slots = DEFAULT_SLOTS,
    domain: Annotated[
        list[str] | None, typer.Option(help="Score on this domain only; may be repeated.")
    ] = None,
    sequences: Annotated[
        str, typer.Option(help=f"Sequences to score on, by number: {', '.join(PARITIES)}.")
    ] = "all",
    as_json: Json = False,
) -> None:
    """Print the hit rate that a profile's fixed hot set has on text that it has not seen.

    Beside it stand what the profile promises on its own text, and what experts chosen blindly
    would hit: a profile below that is worse than none.

    Example: `hotset profile score notes.npz other.trace --slots 0.25`
    """
    from hotset.cli.profile_output import Score, print_scores, score_data

    fractions = read_shares(slots, "--slots")
    loaded, recorded = Profile.load(profile), load_trace(trace)
    loaded.check_fits(recorded.info.fingerprint, name=f"profile `{profile}`")
    replayed = recorded.select(parity=sequences, domains=tuple(domain or ()))
    found = [
        Score(
            slots=fraction,
            own=loaded.expected_hit_rate(fraction),
            uniform=loaded.score(replayed, slots=fraction, policy=StaticUniform.name),
            of_all_layers=loaded.score(replayed, slots=fraction, policy=StaticGlobal.name),
        )
        for fraction in fractions
    ]
    if as_json:
        typer.echo(json.dumps(score_data(found, replayed)))
    else:
        print_scores(found, title=f"{profile} on {trace}: {replayed.num_tokens:,} tokens")

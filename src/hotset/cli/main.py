"""`hotset`: joins the commands, and turns errors into one clear message and an exit code."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from itertools import takewhile
from typing import NoReturn

import typer

from hotset.cli import bench, profile
from hotset.cli.chat import chat
from hotset.cli.doctor import doctor
from hotset.cli.generate import generate
from hotset.cli.heat import heat
from hotset.cli.plan import plan
from hotset.cli.quantize import quantize
from hotset.cli.serve import serve
from hotset.cli.simulate import simulate
from hotset.cli.usage import usage_in_our_words
from hotset.cli.verify import verify
from hotset.core import env
from hotset.core.errors import ConfigError, HotsetError
from hotset.core.transformers_line import explain_other_line

INTERRUPTED = 130  # what a shell gives for SIGINT
# What the system says of an output that takes no more.
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EPIPE)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Run Mixture-of-Experts language models larger than the GPU's memory.",
)
app.command()(generate)
app.command()(chat)
app.command()(plan)
app.command()(serve)
app.command()(verify)
app.command()(simulate)
app.command()(heat)
app.command()(quantize)
app.command()(doctor)
app.add_typer(profile.app, name="profile")
app.add_typer(bench.app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        from hotset import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = typer.Option(
        False,
        "--version",
        help="Print the version and stop.",
        callback=_version,
        is_eager=True,  # before typer misses a command
    ),
) -> None:
    """Options before the command; `--debug` is read in `main`, where errors end up."""


def main(args: list[str] | None = None) -> None:
    """Runs a command line and exits: 0 done, 1 failed, 2 refused, 130 interrupted.

    Whatever went wrong, the last words on stderr are the cause and what to do next; the traceback
    comes before them, and only with `--debug`.
    """
    args = sys.argv[1:] if args is None else args
    debug = "--debug" in takewhile(lambda word: word.startswith("-"), args)
    try:
        level = env.LOG_LEVEL.get() or "warning"
        logging.basicConfig(level=level.upper(), format="%(levelname)s %(name)s: %(message)s")
        with explain_other_line():
            _run(args)
    except HotsetError as error:
        _fail(str(error), error.exit_code, debug=debug)
    except KeyboardInterrupt:
        _fail("interrupted", INTERRUPTED, debug=debug)
    except SystemExit as end:
        if end.code == INTERRUPTED:  # what typer makes of Ctrl-C within a command
            _fail("interrupted", INTERRUPTED, debug=debug)
        raise
    except Exception as error:  # noqa: BLE001 - nobody above would say it in words
        _fail(_words(error), 1, debug=debug)


def _run(args: list[str]) -> None:
    """The command; everything it put out is written when this is left.

    Raises:
        SystemExit: with the exit code.
        ConfigError: there is no stdout, or the words are no command's.
        OSError: stdout takes no more.
    """
    if sys.stderr is None:  # what Python makes of a closed descriptor
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - to the end
    if sys.stdout is None:
        raise ConfigError("stdout is closed", hint="`> /dev/null` drops the output")
    try:
        with usage_in_our_words():
            code = app(args, prog_name="hotset", standalone_mode=False)
    finally:
        sys.stdout.flush()  # a failure can be said here, at the interpreter's end it cannot
    sys.exit(code)


def _words(error: Exception) -> str:
    """A failure that is no `HotsetError`: of an output, or a bug."""
    if isinstance(error, OSError) and error.filename is None and error.errno in _OUTPUT_ERRORS:
        # What is still buffered would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return f"the output cannot be written: {error.strerror}"
    hint = "this is a bug in hotset; report it with the traceback that `hotset --debug` shows"
    return f"{type(error).__name__}: {error}\n\nhint: {hint}"


def _fail(message: str, exit_code: int, *, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exc()
    typer.echo(f"error: {message}", err=True)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()

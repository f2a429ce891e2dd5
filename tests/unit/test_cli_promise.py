"""Flags are a promise: a new one changes a list here, on purpose.

Every command also has `--json` and an example in its help. What the commands do is tested
elsewhere.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from typing import Any

import pytest
from repository import script

MEMORY = ["--context", "--device", "--dtype", "--prefill-chunk", "--ram", "--revision", "--vram"]
SAMPLING = ["--min-p", "--seed", "--temperature", "--top-k", "--top-p"]
ROWS = [
    *("--batch-invariant", "--kv-dtype", "--kv-tokens", "--lossless", "--max-batch"),
    "--no-batch-invariant",
]

FLAGS = {
    "hotset": ["--debug", "--version"],
    "hotset generate": [
        *MEMORY,
        *SAMPLING,
        *("--chat", "--json", "--kernels", "--kv-dtype", "--lossless", "--max-tokens"),
        "--no-strict",
        *("--compiled", "--graphs", "--half-life", "--no-compiled", "--no-graphs", "--policy"),
        *("--profile", "--prompt-file", "--record", "--strict", "--workload"),
        *("--frequency-penalty", "--logit-bias", "--presence-penalty", "--repetition-penalty"),
    ],
    "hotset chat": [
        *MEMORY,
        *SAMPLING,
        *(
            "--api-key",
            "--history",
            "--json",
            "--kernels",
            "--lossless",
            "--max-tokens",
            "--policy",
        ),
        *("--frequency-penalty", "--logit-bias", "--presence-penalty", "--repetition-penalty"),
        "--system",
    ],
    "hotset plan": [
        *(*MEMORY, *ROWS, "--json", "--machine", "--profile", "--sweep", "--trace", "--workload"),
    ],
    "hotset serve": [
        *MEMORY,
        *ROWS,
        *(
            "--allowed-host",
            "--api-key",
            "--compiled",
            "--cors-origin",
            "--engine",
            "--graphs",
            "--half-life",
        ),
        *("--host", "--json", "--kernels", "--max-waiting", "--no-compiled", "--no-graphs"),
        *("--no-prefix-reuse", "--no-strict", "--policy", "--port", "--prefill-share"),
        *("--prefix-reuse", "--profile", "--record", "--served-name", "--strict", "--workload"),
    ],
    "hotset verify": [*MEMORY, "--json", "--kernels", "--lossless", "--text"],
    "hotset simulate": [
        *("--domain", "--experts", "--half-life", "--json", "--plot", "--policy", "--prior-weight"),
        *("--device", "--dtype", "--ram", "--revision", "--text", "--tokens", "--trace", "--vram"),
        *(
            "--machine",
            "--shape",
            "--profile-from",
            "--sequences",
            "--slots",
            "--victims",
            "--window",
            "--wish-lag",
        ),
    ],
    "hotset heat": ["--api-key", "--half-life", "--json", "--output", "--slots", "-o"],
    "hotset doctor": ["--device", "--fresh", "--json", "--machine", "--output", "-o"],
    "hotset profile": [],
    "hotset profile make": [
        *MEMORY,
        *("--forecast", "--json", "--kernels", "--max-tokens", "--no-forecast", "--output"),
        *("--prompts", "--text", "--tokens", "--trace", "--window", "-o"),
    ],
    "hotset profile show": ["--json", "--plot", "--slots"],
    "hotset profile diff": ["--json", "--slots"],
    "hotset profile merge": ["--json", "--output", "-o"],
    "hotset profile score": ["--domain", "--json", "--sequences", "--slots"],
    "hotset quantize": ["--format", "--json", "--output", "--revision", "-o"],
    "hotset bench": [],
    "hotset bench experts": [
        *("--device", "--format", "--hits", "--json", "--kernels", "--layers", "--match"),
        *("--no-match", "--rows", "--shape", "--tokens"),
    ],
    "hotset bench decode": [
        *("--batch", "--context", "--device", "--format", "--json", "--layers"),
        *("--most-context", "--offload-layers", "--plot", "--policies", "--rows", "--shape"),
        *("--slots", "--steps", "--vram"),
    ],
    "hotset bench load": [
        *("--device", "--folder", "--format", "--json", "--layers", "--repeats", "--rows"),
        *("--shape", "--threads"),
    ],
    "hotset bench prefill": [
        *("--device", "--format", "--json", "--kernels", "--layers", "--offload-layers", "--plot"),
        *("--prefill-chunk", "--repeats", "--rows", "--shape", "--slots", "--staging"),
        *("--tokens", "--vram"),
    ],
    "hotset bench serve": [
        *("--device", "--json", "--kernels", "--layers", "--long-prompt", "--prefill-share"),
        *("--prompt-tokens", "--rows", "--shape", "--slots", "--streams", "--tokens", "--trace"),
        "--vram",
    ],
    "hotset bench generate": [
        *("--context", "--device", "--format", "--json", "--kernels", "--layers", "--max-tokens"),
        *("--prefill-chunk", "--prompt-tokens", "--rows", "--shape", "--vram"),
    ],
}

COMMANDS = list(script("docs").commands())
LEAVES = pytest.mark.parametrize(
    ("path", "text", "command"),
    [entry for entry in COMMANDS if not hasattr(entry[2], "commands")],
    ids=lambda value: value if isinstance(value, str) and "\n" not in value else "",
)


def flags_of(command: Any) -> list[str]:
    """Every spelling of every option."""
    options = (p for p in command.params if p.param_type_name == "option")
    return sorted(flag for p in options for flag in (*p.opts, *p.secondary_opts))


def test_no_command_and_no_flag_comes_or_goes_by_accident() -> None:
    found = {path: flags_of(command) for path, _, command in COMMANDS}
    assert found == {path: sorted(flags) for path, flags in FLAGS.items()}


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, hotset.cli.main; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@LEAVES
def test_every_command_can_answer_in_json(path: str, text: str, command: Any) -> None:
    assert "--json" in flags_of(command)


@LEAVES
def test_every_help_has_an_example_that_parses(path: str, text: str, command: Any) -> None:
    example = " ".join(text.split()).partition("Example: `")[2].partition("`")[0]
    words = shlex.split(example)
    assert words[: len(path.split())] == path.split(), f"no example of `{path}` in its help"
    command.make_context(path, words[len(path.split()) :])

"""`hotset profile MODEL` from texts to a profile; what is wrong is said before weights are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hotset.core.errors import ConfigError, RequestError
from hotset.core.hit_curve import HitCurve
from hotset.core.profile import Profile
from hotset.core.trace import load_trace
from hotset.runtime.profiling import Excerpt, cut_text, read_prompts
from vocabulary import byte_ids

ANSWER = 3


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "prose.txt").write_text(
        "It was the best of times, it was the worst of times.\n" * 3
    )
    (tmp_path / "code.txt").write_text("for i in range(10):\n    print(i)\n" * 3)
    lines = [
        {"prompt": "Once upon a time", "domain": "tales"},
        {"messages": [{"role": "user", "content": "Hello"}]},
    ]
    words = "\n".join(json.dumps(line) for line in lines)
    (tmp_path / "prompts.jsonl").write_text(words + "\n\n")
    return tmp_path


def test_texts_and_prompts_become_one_profile(
    run: Callable, chatty: Path, texts: Path, tmp_path: Path
) -> None:
    args = ("profile", chatty, "--device", "cpu", "--context", 96, "-o", tmp_path / "p")
    given = ("--text", texts / "prose.txt", "--text", texts / "code.txt", "--tokens", 60)
    more = ("--prompts", texts / "prompts.jsonl", "--max-tokens", ANSWER, "--window", 32)
    done = run(*args, *given, *more, "--trace", tmp_path / "t.trace", "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    trace, profile = load_trace(tmp_path / "t.trace"), Profile.load(tmp_path / "p.npz")
    assert said["domains"] == ["prose", "code", "tales", "prompts"]
    prompts = [sequence.num_tokens for sequence in trace.sequences if sequence.index >= 4]
    assert [s.num_tokens for s in trace.sequences][:4] == [32, 28, 32, 28]
    # The begin id comes before a prompt, and an answer may end early at the end id.
    num_prompt = 1 + len(byte_ids("Once upon a time"))
    assert num_prompt < prompts[0] <= num_prompt + ANSWER
    assert said["tokens"] == profile.num_tokens == trace.num_tokens == 120 + sum(prompts)
    assert np.array_equal(profile.counts_LE, trace.total_counts())
    assert profile.fingerprint.router_hash == said["router_hash"] != ""
    assert profile.forecast is not None
    assert profile.replay is not None
    assert profile.replay == HitCurve.from_trace(trace).replayed()
    assert profile.source == "prose.txt; code.txt; prompts.jsonl"


class Words:
    """Text that is one id a word."""

    def encode(self, prompt: str) -> list[int]:
        if not isinstance(prompt, str):
            raise RequestError("the prompt is no text", hint="write one")
        return [len(word) for word in prompt.split()]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode(" ".join(message["content"] for message in messages))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("not json", "`p.jsonl`, line 1 is not JSON"),
        ('{"prompt": "a"}\n[]', "line 2 is not an object with either `prompt` or `messages`"),
        ('{"prompt": "a", "messages": []}', "line 1 is not an object with either"),
        ('{"prompt": "a", "domain": 3}', "line 1 has no tokens, or a `domain` that is no text"),
        ('{"prompt": ""}', "line 1 has no tokens"),
        ('{"prompt": "a"}\n{"prompt": 3}', "`p.jsonl`, line 2: the prompt is no text"),
        ("\n", "holds no prompt"),
    ],
)
def test_prompts_that_are_none(lines: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_prompts(Words(), Path("p.jsonl"), lines)  # type: ignore[arg-type]
    assert message in caught.value.message


def test_texts_are_cut_into_windows() -> None:
    found = cut_text(Words(), "a bb ccc dddd e", domain="x", window=2, most=3)  # type: ignore[arg-type]
    assert found == [Excerpt((1, 2), "x"), Excerpt((3,), "x")]
    with pytest.raises(ConfigError, match="the text `x` has no tokens"):
        cut_text(Words(), "", domain="x", window=2)  # type: ignore[arg-type]


def test_a_model_needs_something_to_run(run: Callable, tmp_path: Path) -> None:
    """The first word is no command, so it is a model."""
    done = run("profile", "pocket", "-o", tmp_path / "p")
    assert done.code == 2 and "there is nothing to run" in done.last_words[0]


def test_a_trace_has_a_file_of_its_own(run: Callable, texts: Path) -> None:
    """Before the model is read, which is none."""
    args = ("profile", "none/none", "--text", texts / "prose.txt", "-o", texts / "p.npz")
    done = run(*args, "--trace", texts / "p.npz")
    assert done.code == 2 and "`--output` and `--trace` are the same file" in done.last_words[0]
    done = run(*args, "--trace", texts / "none" / "trace")
    assert done.code == 2 and "cannot be written: No such file" in done.last_words[0]


def test_a_window_beyond_the_context_is_refused(run: Callable, chatty: Path, texts: Path) -> None:
    args = ("profile", chatty, "--device", "cpu", "--context", 16, "-o", texts / "p")
    done = run(*args, "--text", texts / "prose.txt")
    assert done.code == 2
    assert "does not fit the context of 16" in done.last_words[0]
    assert "`--window`" in done.last_words[1]

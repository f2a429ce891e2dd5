"""`hotset generate` from its arguments to stdout: text, JSON, prompts, sampling, exit codes."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hotset
from families import make_chatty
from vocabulary import byte_ids

FEW = ("--max-tokens", "12")


@pytest.fixture(scope="module")
def answer(chatty: Path) -> str:
    """What the Python API answers to `hello`."""
    with hotset.load(str(chatty), device="cpu") as model:
        return "".join(token.text for token in model.generate("hello", max_tokens=12))


def test_stdout_is_the_answer_and_stderr_the_talk(run, chatty: Path, answer: str) -> None:
    done = run("generate", chatty, "hello", *FEW)
    assert done.code == 0
    assert done.out == answer + "\n"
    for said in ("tokens/s", "hit rate", "over the link per token", "slots", "peak VRAM", "RSS"):
        assert said in done.err
    assert re.search(r"host: planned \d.*peak RSS \d", done.err)
    assert "Traceback" not in done.err


def test_json_is_one_object(run, chatty: Path, answer: str) -> None:
    done = run("generate", chatty, "hello", *FEW, "--json")
    result = json.loads(done.out)
    assert done.out.count("\n") == 1
    assert set(result) == {"text", "token_ids", "finish_reason", "stats", "self_check"}
    assert result["text"] == answer
    assert len(result["token_ids"]) == 12 and result["finish_reason"] == "length"
    stats = result["stats"]
    assert stats["num_tokens"] == 12 and stats["num_prompt_tokens"] == 1 + len("hello")
    assert stats["host_peak_bytes"] > 0 and stats["num_slots"] == 0 and stats["hit_rate"] == 0.0
    # 2 of 8 experts of 4 layers, each read once a token: every byte of them crossed.
    assert stats["link_bytes_per_token"] == 4 * 2 * 6144


def test_an_end_id_ends_the_answer(run, chatty: Path, tmp_path: Path) -> None:
    """SV-19: an id that only generation_config names; it is in the ids and not in the text."""
    plain = json.loads(run("generate", chatty, "hello", *FEW, "--json").out)
    folder = tmp_path / "model"
    shutil.copytree(chatty, folder)
    end = next(i for i, token in enumerate(plain["token_ids"]) if token >= 4)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [plain["token_ids"][end]]})
    )
    result = json.loads(run("generate", folder, "hello", *FEW, "--json").out)
    assert result["finish_reason"] == "stop"
    assert result["token_ids"] == plain["token_ids"][: end + 1]
    assert plain["text"].startswith(result["text"])


def test_prompts_from_files_and_stdin(
    run, chatty: Path, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hello", encoding="utf-8")
    assert run("generate", chatty, *FEW, "--prompt-file", file).out == answer + "\n"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"hello")))
    assert run("generate", chatty, *FEW, "--prompt-file", "-").out == answer + "\n"


def test_a_chat_goes_through_the_template(run, chatty: Path) -> None:
    done = run("generate", chatty, "hello", *FEW, "--chat", "--json")
    chat = "\n".join(["user", "hello", "", "assistant", ""]).replace("\n\n", "\n")
    # One BOS, and the marks around the two turns.
    want = 1 + 3 + len(byte_ids(chat))
    assert json.loads(done.out)["stats"]["num_prompt_tokens"] == want


def test_sampling_is_repeatable_by_its_seed(run, chatty: Path, answer: str) -> None:
    def text(*flags: str) -> str:
        found: str = run("generate", chatty, "hello", *FEW, "--temperature", "1.5", *flags).out
        return found

    assert text("--seed", "7") == text("--seed", "7") != text("--seed", "8")
    assert text("--seed", "7", "--top-k", "1") == answer + "\n"


def test_biases_and_penalties_reach_the_answer(run, chatty: Path, answer: str) -> None:
    def ids(*flags: str) -> list[int]:
        found = run("generate", chatty, "hello", *FEW, "--json", *flags).out
        return list(json.loads(found)["token_ids"])

    few = int(FEW[-1])
    assert ids("--logit-bias", "70=100", "--logit-bias", "71=-100") == [70] * few
    # Twelve of the first token cost it more than the ten that it is ahead of the second.
    two = ("--logit-bias", "70=100", "--logit-bias", "71=90")
    assert set(ids(*two)) == {70}
    assert set(ids(*two, "--frequency-penalty", "2")) == {70, 71}
    for flags in (("--logit-bias", "70"), ("--repetition-penalty", "0")):
        done = run("generate", chatty, "hello", *FEW, *flags)
        assert done.code == 2 and f"`{flags[0]}" in done.err and not done.out


def test_memory_flags_change_what_is_allocated(run, chatty: Path) -> None:
    """UX-02: slots by `--vram`; what a budget leaves by `--context`."""

    def slots(*flags: str) -> int:
        done = run("generate", chatty, "hello", "--max-tokens", "2", "--json", *flags)
        return int(json.loads(done.out)["stats"]["num_slots"])

    with hotset.load(str(chatty), device="cpu", context=64, prefill_chunk=64) as model:
        least = model.plan.device.total_bytes
    chunk, roomy = ("--prefill-chunk", "64"), ("--vram", str(least + 20 * 6144 + 3000))
    assert slots(*chunk, "--context", "64") == 0
    many = slots(*chunk, "--context", "64", *roomy)
    assert 15 < many <= 20
    assert 0 < slots(*chunk, "--context", "96", *roomy) < many


@pytest.mark.parametrize(
    ("words", "cause", "command"),
    [
        (["generate", "m", "--frobnicate"], "no such option: --frobnicate", "hotset generate"),
        (["generate", "m", "--max-tokens", "many"], "`--max-tokens` is `many`", "hotset generate"),
        (["generate", "m", "--max-tokens", "1.5"], "must be a whole number", "hotset generate"),
        (
            ["generate", "m", "--top-p", "x"],
            "`--top-p` is `x`, it must be a num",
            "hotset generate",
        ),
        (["generate", "m", "--seed"], "option '--seed' requires an argument", "hotset"),
        (["generate", "m", "hello", "more"], "unexpected extra argument", "hotset generate"),
        (["generate"], "missing argument 'MODEL'", "hotset generate"),
        (["bench", "expert"], "no such command 'expert'. Did you mean", "hotset bench"),
    ],
)
def test_words_that_are_no_command(run, words: list[str], cause: str, command: str) -> None:
    """Said as every other error: value, what it must be, where to look; no library's words."""
    done = run(*words)
    assert done.code == 2 and done.out == ""
    assert done.err.startswith("error: ") and cause in done.last_words[0]
    assert done.last_words[1] == f"hint: `{command} --help` says what it takes"
    assert "Input should be" not in done.err


@pytest.mark.parametrize("words", [[], ["bench"]])
def test_no_words_at_all_are_answered_with_the_help(run, words: list[str]) -> None:
    done = run(*words)
    assert done.code == 2 and "Commands:" in done.err and "error: " not in done.err


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("/no/such/folder", "no folder"),
        ("./here", "no folder"),
        ("weights.gguf", "GGUF"),
    ],
)
def test_models_that_are_not_there(run, model: str, words: str) -> None:
    done = run("generate", model, "hello")
    assert done.code == 1 and words in done.last_words[0]
    assert done.last_words[1].startswith("hint: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_asked_for_where_there_is_none(run, chatty: Path) -> None:
    done = run("generate", chatty, "hello", "--device", "cuda")
    assert done.code == 1 and "no CUDA device" in done.last_words[0]
    assert "--device cpu" in done.last_words[1]


def test_a_chat_without_a_template(run, tmp_path: Path) -> None:
    done = run("generate", make_chatty(tmp_path, template=None), "hello", "--chat")
    assert done.code == 2 and "no chat template" in done.last_words[0]


def test_prompts_that_are_not_text(run, chatty: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.bin"
    file.write_bytes(b"\xff\xfe")
    done = run("generate", chatty, "--prompt-file", file)
    assert done.code == 2 and "not UTF-8" in done.last_words[-1]


def test_debug_shows_the_traceback_before_the_last_words(run, chatty: Path) -> None:
    done = run("--debug", "generate", chatty, "hello", "--max-tokens", "0")
    assert "Traceback" in done.err and done.code == 2
    assert done.last_words[-1].startswith("error: `--max-tokens` is 0")
    # After the command it is the command's own option, which it does not have.
    assert run("generate", chatty, "hello", "--debug").code == 2


def test_a_bug_of_ours_is_called_one(run, chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("slot 7")

    monkeypatch.setattr("hotset.runtime.engine.Engine", broken)
    done = run("generate", chatty, "hello")
    assert done.code == 1 and "Traceback" not in done.err
    assert done.last_words[0] == "error: KeyError: 'slot 7'"
    assert "hotset --debug" in done.last_words[1]


def test_an_interruption_is_exit_code_130(
    run, chatty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hotset.runtime.engine.Engine", interrupted)
    done = run("generate", chatty, "hello")
    assert done.code == 130 and done.last_words == ["error: interrupted"]


def test_the_version(run) -> None:
    done = run("--version")
    assert (done.code, done.out) == (0, hotset.__version__ + "\n")

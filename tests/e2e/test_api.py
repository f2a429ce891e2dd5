"""The Python API: loading by options, answers token by token, what they cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hotset
from families import make_family
from hotset.core.errors import CheckpointError, ConfigError, RequestError
from hotset.core.request import FinishReason
from vocabulary import byte_ids

FEW = 12


@pytest.fixture(scope="module")
def model(chatty: Path) -> Iterator[hotset.Model]:
    with hotset.load(str(chatty), device="cpu") as model:
        yield model


def test_loading_tells_how_far_it_is(chatty: Path) -> None:
    told: list[tuple[int, int]] = []
    with hotset.load(
        str(chatty), device="cpu", progress=lambda done, total: told.append((done, total))
    ) as model:
        expert_bytes = model.engine.geometry.expert_bytes
    done = [bytes_done for bytes_done, _ in told]
    assert done == sorted(done) and told[-1] == (expert_bytes, expert_bytes)


@pytest.mark.parametrize(
    ("options", "words", "hint"),
    [
        ({"vrma": "1GiB"}, "unknown option `vrma`", "vram"),
        ({"max_model_length": 8}, "unknown option `max_model_length`", "known:"),
        ({"vram": "lots"}, "`vram` is `lots`", "8GiB"),
        ({"vram": -1}, "`vram` is -1", ""),
        ({"device": "tpu"}, "`device` is `tpu`", "did you mean `cpu`"),
        ({"context": 1}, "context.* is 1", ""),
        ({"kernels": "fast"}, "`kernels` is `fast`", "triton"),
        ({"policy": "best"}, "best", ""),
        ({"half_life": 0}, "`half_life` is 0", ""),
    ],
)
def test_options_that_are_wrong(
    chatty: Path, options: dict[str, object], words: str, hint: str
) -> None:
    """Nothing that a user sets is ignored."""
    with pytest.raises(ConfigError, match=words) as caught:
        hotset.load(str(chatty), **options)
    assert hint in (caught.value.hint or "")


def test_sizes_in_words_and_in_bytes(chatty: Path) -> None:
    plans = []
    for vram in ("65.75MiB", int(65.75 * 2**20)):
        with hotset.load(str(chatty), device="cpu", vram=vram, context=64) as model:
            plans.append(model.plan)
    assert plans[0].num_slots == plans[1].num_slots > 0
    assert plans[0].context_tokens == 64


def test_an_answer_token_by_token(model: hotset.Model) -> None:
    tokens = list(model.generate("hello", max_tokens=FEW))
    assert [token.finish_reason for token in tokens] == [None] * (FEW - 1) + [FinishReason.LENGTH]
    ids = [token.token_id for token in tokens]
    assert "".join(token.text for token in tokens) == model.text.decode(ids)
    with_ids = model.generate(token_ids=[0, *byte_ids("hello")], max_tokens=FEW)
    assert [token.token_id for token in with_ids] == ids


def test_an_end_id_is_not_part_of_the_text(model: hotset.Model) -> None:
    ids = [token.token_id for token in model.generate("hello", max_tokens=FEW)]
    tokens = list(model.generate("hello", max_tokens=FEW, stop_ids=frozenset([ids[2]])))
    assert tokens[-1].finish_reason is FinishReason.STOP
    end = ids.index(ids[2])
    assert "".join(token.text for token in tokens) == model.text.decode(ids[:end])


def test_a_conversation(model: hotset.Model) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = list(model.generate(messages=messages, max_tokens=2))
    assert len(tokens) == 2
    assert model.stats.num_prompt_tokens == len(model.text.encode_chat(messages))


def test_exactly_one_prompt(model: hotset.Model) -> None:
    for prompt in ({}, {"prompt": "a", "token_ids": [4]}, {"token_ids": [4], "messages": []}):
        with pytest.raises(RequestError, match="it must be one"):
            model.generate(**prompt)  # type: ignore[arg-type]


def test_what_is_wrong_is_said_where_it_is_asked(model: hotset.Model) -> None:
    """Before the first token, so that a caller may answer with an error."""
    for options in ({"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 2.0}):
        with pytest.raises(RequestError):
            model.generate("hello", **options)  # type: ignore[arg-type]


def test_defaults_are_the_checkpoints_and_can_be_overridden(
    model: hotset.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotset.core.request import SamplingParams

    def ids(**options: object) -> list[int]:
        return [t.token_id for t in model.generate("hello", max_tokens=FEW, **options)]

    greedy = ids()
    hot = SamplingParams(temperature=3.0, top_k=50, seed=5)
    monkeypatch.setattr(model.text, "sampling_defaults", lambda: hot)
    assert ids() == ids() != greedy
    assert ids(temperature=0.0) == greedy
    assert ids(seed=6) != ids()
    wary = SamplingParams(repetition_penalty=2.0)
    monkeypatch.setattr(model.text, "sampling_defaults", lambda: wary)
    assert ids() != ids(repetition_penalty=1.0) == greedy


def test_costs(chatty: Path) -> None:
    """Every expert that a token uses is a hit or crosses the link once."""
    with hotset.load(str(chatty), device="cpu") as model:
        assert model.stats.num_tokens == 0
        for count, _ in enumerate(model.generate("hello", max_tokens=FEW), start=1):
            assert model.stats.num_tokens == count
        stats = model.stats
    layers, top_k, record = 4, 2, 6144
    assert stats.num_slots == 0 and stats.hit_rate == 0.0
    assert stats.link_bytes_per_token == layers * top_k * record
    # The prompt's six tokens share experts: each is read once a layer.
    assert layers * top_k * record <= stats.prompt_link_bytes <= layers * 8 * record
    assert stats.first_token_seconds > 0 and stats.tokens_per_second > 0
    assert stats.host_peak_bytes > 0 and stats.device_peak_bytes == 0
    assert stats.to_dict()["num_tokens"] == FEW


def test_all_hits_cost_nothing(chatty: Path) -> None:
    with hotset.load(str(chatty), device="cpu", vram="1GiB") as model:
        list(model.generate("hello", max_tokens=FEW))
        stats = model.stats
    assert stats.num_slots == 32 and stats.hit_rate == 1.0
    assert stats.link_bytes_per_token == 0.0


def test_the_plan_is_what_is_allocated(chatty: Path) -> None:
    """UX-02: slots to the byte, at two budgets."""
    record, sizes = 6144, []
    with hotset.load(str(chatty), device="cpu", context=64) as model:
        least = model.plan.device.total_bytes
    for extra in (5, 20):
        vram = least + extra * record + record // 2
        with hotset.load(str(chatty), device="cpu", context=64, vram=vram) as model:
            store, plan = model.engine.store, model.plan
            assert store.slots.nbytes == plan.device["slots"] == plan.num_slots * record
            assert store.arena.nbytes == plan.host["expert arena"]
            assert plan.device.total_bytes <= vram
            sizes.append(store.slots.nbytes)
    assert sizes[1] - sizes[0] == 15 * record


def test_a_longer_context_admits_longer_prompts(chatty: Path) -> None:
    """UX-02: `context` and `prefill_chunk` at two values each."""
    for context, chunk in ((64, 16), (128, 64)):
        with hotset.load(str(chatty), device="cpu", context=context, prefill_chunk=chunk) as model:
            sizes: list[int] = []
            model.engine.model.get_input_embeddings().register_forward_hook(
                lambda module, given, out, sizes=sizes: sizes.append(given[0].numel())
            )
            prompt = "x" * (context - 2)  # and a BOS
            assert len(list(model.generate(prompt, max_tokens=1))) == 1
            assert sum(sizes) == context - 1 and set(sizes[:-1]) == {chunk}
            with pytest.raises(RequestError, match=f"context of {context}"):
                model.generate(prompt + "x", max_tokens=1)


def test_a_model_without_a_tokenizer_is_a_damaged_one(tmp_path: Path) -> None:
    make_family("qwen3_moe", tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="tokenizer"):
        hotset.load(str(tmp_path), device="cpu")


def test_logits_and_closing(chatty: Path) -> None:
    with hotset.load(str(chatty), device="cpu") as model:
        logits = model.logits(byte_ids("hello"))
        assert logits.shape == (5, 260) and logits.dtype == torch.float32
    model.close()
    with pytest.raises(RequestError, match="closed"):
        model.generate("hello")
    with pytest.raises(RequestError, match="closed"):
        model.logits([4])


def test_models_do_not_share_a_thing(chatty: Path, model: hotset.Model) -> None:
    """Two of one process, answering in turns."""
    want = [token.token_id for token in model.generate("hello", max_tokens=FEW)]
    with hotset.load(str(chatty), device="cpu", vram="1GiB") as other:
        both = zip(
            model.generate("hello", max_tokens=FEW),
            other.generate("hello", max_tokens=FEW),
            strict=True,
        )
        assert [(a.token_id, b.token_id) for a, b in both] == [(token, token) for token in want]
    assert [token.token_id for token in model.generate("hello", max_tokens=FEW)] == want


def test_names_of_the_package() -> None:
    assert {"load", "Model", "Token", "Stats"} <= set(hotset.__all__)
    with pytest.raises(AttributeError, match="no attribute `nothing`"):
        _ = hotset.nothing

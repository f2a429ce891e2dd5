"""Who may come in: keys, host names, origins. Everything else is refused before it is parsed."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import httpx2
import openai
import pytest
from clients import NAME, Scripted, serving

from hotset.core.errors import ConfigError
from hotset.runtime.text import Text
from hotset.server.config import ServerConfig

KEYS = ("first-key", "second-key")
ORIGIN = "https://chat.example.org"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def guarded(byte_text: Text) -> Iterator[Scripted]:
    config = ServerConfig(
        port=0, api_keys=KEYS, cors_origins=(ORIGIN,), allowed_hosts=("proxy.example.org",)
    )
    with serving(byte_text, config) as server:
        yield server


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/plan", "/hotset/heat", "/nowhere"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic first-key"}, 401),
        ({"x-api-key": "first-ke"}, 401),
        ({"x-api-key": "second-key"}, 200),
        ({"authorization": "Bearer first-key"}, 200),
    ],
)
def test_keys(guarded: Scripted, path: str, headers: dict[str, str], status: int) -> None:
    wanted = 404 if status == 200 and path == "/nowhere" else status
    assert httpx2.get(guarded.url + path, headers=headers).status_code == wanted


def test_a_probe_needs_no_key(guarded: Scripted) -> None:
    assert httpx2.get(f"{guarded.url}/health").status_code == 200


def test_clients_with_and_without_a_key(guarded: Scripted) -> None:
    url = f"{guarded.url}/v1"
    chat = openai.OpenAI(base_url=url, api_key=KEYS[1]).chat.completions
    assert chat.create(model=NAME, messages=USER).choices[0].message.content == "Hello"  # type: ignore[arg-type]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="none").chat.completions.create(
            model=NAME,
            messages=USER,  # type: ignore[arg-type]
        )
    for key in (KEYS[0], "none"):
        messages = anthropic.Anthropic(base_url=guarded.url, api_key=key).messages
        if key == "none":
            with pytest.raises(anthropic.AuthenticationError):
                messages.create(model=NAME, messages=USER, max_tokens=9)  # type: ignore[arg-type]
        else:
            messages.create(model=NAME, messages=USER, max_tokens=9)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:1234", 200),
        ("[::1]:80", 200),
        ("proxy.example.org", 200),
        ("attacker.example.org", 403),
        ("attacker.example.org:8000", 403),
        ("127.0.0.1.example.org", 403),
        ("", 403),
    ],
)
def test_a_name_that_leads_here_is_not_enough(guarded: Scripted, host: str, status: int) -> None:
    """What a page of another site would say that has pointed its name at 127.0.0.1."""
    assert httpx2.get(f"{guarded.url}/health", headers={"host": host}).status_code == status


def test_only_named_origins_may_read(guarded: Scripted, server: Scripted) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    for running, origin, allowed in (
        (guarded, ORIGIN, True),
        (guarded, "https://other.example.org", False),
        (server, ORIGIN, False),
    ):
        headers = {"origin": origin, **asks}
        answer = httpx2.options(f"{running.url}/v1/chat/completions", headers=headers)
        assert ("access-control-allow-origin" in answer.headers) is allowed


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000},
        {"api_keys": ("",)},
        {"api_keys": ("with space",)},
        {"api_keys": ("schlüssel",)},
        {"cors_origins": ("example.org",)},
        {"max_waiting": 0},
        {"max_waiting": 10**30},
        {"names": ("pocket", " ")},
        {"allowed_hosts": ("",)},  # or whoever names no host would be let in
        {"allowed_hosts": ("https://chat.example.org",)},
    ],
    ids=str,
)
def test_settings_that_are_none(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as info:
        ServerConfig(**wrong)  # type: ignore[arg-type]
    assert info.value.option is not None


def test_an_address_may_be_an_allowed_host() -> None:
    assert ServerConfig(allowed_hosts=("2001:db8::1", "proxy.example.org"))


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("", False)],
)
def test_which_addresses_are_of_this_machine_only(host: str, loopback: bool) -> None:
    assert ServerConfig(host=host).loopback is loopback

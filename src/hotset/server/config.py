"""What a user may choose about a server; defaults live here and nowhere else.

Nothing of the model: that is `EngineConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address

from hotset.core.errors import ConfigError
from hotset.core.units import MIB

_MAX_PORT = 65535
# Each one that waits holds a connection, and a process has about so many.
_MAX_WAITING = 10_000


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where a server listens, whom it lets in, and how long it waits.

    Attributes:
        host: address to listen on.
        port: TCP port; 0 takes a free one.
        names: what the model is called in `/v1/models` and in requests; the first is the one in
            answers. Empty: by the checkpoint.
        api_keys: any of them opens the server; none leaves it open.
        cors_origins: web origins that a browser may call from, `*` for all.
        allowed_hosts: besides loopback names, what a `Host` header may say where `host` is a
            loopback address; a page of another site cannot reach the server by pointing its own
            name at 127.0.0.1.
        max_body_bytes: of a request.
        max_header_bytes: of a request's line and headers.
        request_seconds: that a request may take to arrive.
        max_waiting: requests beyond these are refused while they wait for a row.
        drain_seconds: what running answers are given after SIGTERM.
        stall_seconds: without progress of a busy engine `/health` says 503.

    Raises:
        ConfigError: a value out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 8 * MIB
    max_header_bytes: int = 32 * 1024
    request_seconds: float = 120.0
    max_waiting: int = 64
    drain_seconds: float = 30.0
    stall_seconds: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= _MAX_PORT:
            raise ConfigError(f"`port` is {self.port}, it must be in 0..{_MAX_PORT}", option="port")
        if not 1 <= self.max_waiting <= _MAX_WAITING:
            raise ConfigError(
                f"`max_waiting` is {self.max_waiting}, it must be in 1..{_MAX_WAITING}",
                option="max_waiting",
            )
        for name in self.names:
            if not name.strip():
                raise ConfigError(
                    "`served_name` is empty",
                    hint="write what requests send as `model`, or leave it out",
                    option="served_name",
                )
        for host in self.allowed_hosts:
            if not _is_host(host):
                raise ConfigError(
                    f"`allowed_host` is `{host}`, which is no host name",
                    hint="write the name alone, as `chat.example.org`",
                    option="allowed_host",
                )
        for key in self.api_keys:
            if not key or not key.isascii() or any(letter.isspace() for letter in key):
                raise ConfigError(
                    "an API key is empty, or has spaces or letters beyond ASCII",
                    hint="make one with `openssl rand -hex 32`",
                    option="api_key",
                )
        for origin in self.cors_origins:
            if origin != "*" and "://" not in origin:
                raise ConfigError(
                    f"`cors_origin` is `{origin}`, which is no origin",
                    hint="write it as `https://chat.example.org`, or `*` for every site",
                    option="cors_origin",
                )

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False


def _is_host(text: str) -> bool:
    """Whether it may be a host name or an address, without a scheme or a port."""
    try:
        ip_address(text)
    except ValueError:
        return bool(text) and not any(letter in "/:" or letter.isspace() for letter in text)
    return True

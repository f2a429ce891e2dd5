"""Takes a port. Imports nothing that takes time, so that one in use is refused at once."""

from __future__ import annotations

import socket

from hotset.core.errors import ConfigError
from hotset.server.config import ServerConfig


def bind(config: ServerConfig) -> socket.socket:
    """Takes the port, without listening on it: a client is refused until the model is loaded.

    Raises:
        ConfigError: the address is taken, not of this machine, or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on `{config.host}` port {config.port}: {error.strerror}",
            hint="`--port 0` takes a free one; `--host 127.0.0.1` is this machine only",
            option="port",
        ) from error
    return bound

"""The listening socket, and the end of a server.

Always true:
- the port is taken before the model is opened: one in use is an error at once
- at SIGTERM or SIGINT no answer is begun any more; those in progress finish, or are cut with a finish_reason
- a connection that asks for nothing is closed, and so is one too many; the process's signal handlers are put back
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import resource
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from offload.errors import ArgumentError
from offload.serving.app import App
from offload.serving.engine import ServingEngine

_PATIENCE = 30  # seconds in which a connection asks for something
_AFTER_CUT = 15  # seconds for clients to read the ends of answers that were cut
_log = logging.getLogger("offload.serving")


def listening(host: str, port: int) -> socket.socket:
    """A listening socket, at a free port for 0; `ArgumentError` if the address can't be listened at."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:  # gaierror is one
        if error.errno == errno.EADDRINUSE:
            raise ArgumentError(f"port {port} of {host} is in use: choose another one with --port") from error
        raise ArgumentError(f"can't listen at port {port} of {host}: {error.strerror or error}") from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can ask."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def serve(app: App, engine: ServingEngine, at: socket.socket, *, grace: float, ready: Callable[[], None]) -> None:
    """Answer requests until a signal comes; then those in progress have `grace` seconds, and all is closed."""
    config = uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_PATIENCE,
        timeout_graceful_shutdown=int(grace) + _AFTER_CUT,
    )
    server = _Server(config, engine, grace, ready)
    try:
        asyncio.run(server.serve(sockets=[at]))
    finally:
        engine.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, engine: ServingEngine, grace: float, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._engine, self._grace, self._ready = engine, grace, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        left = self._engine.figures().running
        if left and not self.force_exit:
            _log.info("ending: %d answers in progress have %g seconds; a second signal cuts them", left, self._grace)
        self._engine.end(0 if self.force_exit else self._grace)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """The first signal ends the server, the second one at once. None is noted, which uvicorn would raise again."""
        self.force_exit = self.should_exit
        self.should_exit = True


class _Connection(H11Protocol):
    """A connection that is closed if its first request does not come in time; later ones are uvicorn's to wait for."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(_PATIENCE, self._close_if_unused)
        if len(self.connections) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:  # the model's files need some
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _close_if_unused(self) -> None:
        request: object = self.cycle  # None, although uvicorn's annotation says otherwise
        if request is None:
            self.transport.close()

"""The process: sockets, signals and the end."""

import asyncio
import logging
import os
import resource
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from paged.server.protocol import BoundedHttp
from paged.server.service import Service

log = logging.getLogger("paged.server")
SPARE_FILES = 64  # beside connections: adapters and answers of engines that are in other processes


def check_address(host: str, port: int) -> None:
    """Raise ValueError where nobody can listen, before an engine is made."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise ValueError(f"--host={host} --port={port}: {error.strerror}") from None


def connections_for(wanted: int) -> int:
    """Raise the process's limit of open files as far as `wanted` connections need, and return how
    many connections it then allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = len(os.listdir("/dev/fd")) + SPARE_FILES
    most = hard if hard != resource.RLIM_INFINITY else wanted + others
    if soft != resource.RLIM_INFINITY and soft < wanted + others:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted + others, most), hard))
    allowed = max(1, min(wanted, most - others))
    if allowed < wanted:
        log.warning(
            "%d connections at a time, not %d: the process may have %d files open (ulimit -Hn)",
            allowed, wanted, hard,
        )  # fmt: skip
    return allowed


class Server(uvicorn.Server):
    """The first SIGTERM or SIGINT lets running requests end, within `drain_s`; new ones are refused
    with status 503 meanwhile. The next one ends it at once. stopped_by: the first of them."""

    def __init__(self, app: FastAPI, service: Service, host: str, port: int):
        config = uvicorn.Config(
            app, host=host, port=port, log_config=None, access_log=False, lifespan="off",
            timeout_graceful_shutdown=5, http=BoundedHttp,
            timeout_keep_alive=service.settings.head_timeout_s,
        )  # fmt: skip
        super().__init__(config)
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task | None = None
        self.stopped_by: signal.Signals | None = None

    async def startup(self, sockets=None) -> None:
        self._loop = asyncio.get_running_loop()
        most = connections_for(self._service.settings.max_connections)
        self.config.limit_concurrency = most + 1  # uvicorn refuses at the limit itself
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.stopped_by is not None or self._loop is None:
            self.should_exit = self.force_exit = True
            self.config.timeout_graceful_shutdown = 0  # it waits for connections all the same
            return
        self.stopped_by = signal.Signals(sig)
        self._loop.call_soon_threadsafe(self._begin_drain)

    def stop(self) -> None:
        """As the first signal does, from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        if self._drain is None:
            self._drain = asyncio.create_task(self._drained())

    async def _drained(self) -> None:
        await self._service.drain()
        self.should_exit = True

    @property
    def port(self) -> int:
        """The one that it listens on, once it has started."""
        return self.servers[0].sockets[0].getsockname()[1]

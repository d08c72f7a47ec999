"""The server of a stack: Prefect's own application on a socket that the supervisor has opened.

The socket listens before Prefect is imported, so no other program can take the port in between, and requests
of workers that start at the same time wait in its queue.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from prefect_torch_elastic.dev.programs.report import Event, Report, bind_to_supervisor

_CLOSE_SECONDS = 1  # for open requests; workers' sockets are open until they are closed


def main(listening: int, pipe: int, supervisor: int) -> None:
    """Serve until SIGTERM."""
    bind_to_supervisor(supervisor)
    for fd in (listening, pipe):
        os.set_inheritable(fd, False)

    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.settings import get_current_settings

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            if self.started:
                Report(part="server", event=Event.READY, pid=os.getpid()).send(pipe)

    settings = get_current_settings().server.api
    config = uvicorn.Config(
        create_app(final=True),
        log_level="warning",
        lifespan="on",
        timeout_keep_alive=settings.keepalive_timeout,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    with socket.socket(fileno=listening) as opened:
        asyncio.run(Server(config).serve(sockets=[opened]))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

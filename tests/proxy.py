"""A way to a server that a test can close: it refuses then, and cuts what is open."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit


class ClosableProxy:
    """Passes bytes on to the host of a URL until it is closed, and again after it is opened.

    Attributes:
        url: The URL through the proxy.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname or "", parts.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = self._listener.getsockname()[1]
        self.url = parts._replace(netloc=f"127.0.0.1:{self._port}").geturl()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._serve(self._listener)

    def close(self) -> None:
        """Refuse from now on, and cut what is open."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            cut, self._open = self._open, set()
        for connection in cut:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def open(self) -> None:
        """Accept again at the same port."""
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._serve(self._listener)

    def _serve(self, listener: socket.socket) -> None:
        threading.Thread(target=self._accept, args=[listener], daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(self._target)
                with self._lock:
                    self._open |= {near, far}
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=[source, sink], daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

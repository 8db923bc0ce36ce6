"""Connections over HTTP."""

from __future__ import annotations

import os
import socket
import struct
import threading

from shmserve.transport.http_link import HttpLink


def test_a_connection_that_the_server_has_reset_is_closed() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        link = HttpLink("http", f"127.0.0.1:{server.getsockname()[1]}", "")
        assert link.status("GET", "/") == 200
        thread.join()
        link.close()
    assert set(os.listdir("/proc/self/fd")) == before

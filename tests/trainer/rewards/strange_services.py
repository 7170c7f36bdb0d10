"""A server on loopback that answers with the bytes which the first completion names."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Answer = Callable[[socket.socket, threading.Event], None]


def _sent(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> Answer:
    head = (f"HTTP/1.1 {status}", f"content-length: {len(body) if length is None else length}", *headers, "", "")

    def send(connection: socket.socket, _: threading.Event) -> None:
        connection.sendall("\r\n".join(head).encode() + body)

    return send


def _raw(content: bytes) -> Answer:
    return lambda connection, _: connection.sendall(content)


def _silence(_connection: socket.socket, is_over: threading.Event) -> None:
    is_over.wait()


def _drip(connection: socket.socket, is_over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
    while not is_over.wait(0.05):
        connection.sendall(b" ")


def _headers_for_ever(connection: socket.socket, is_over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while not is_over.is_set():
        connection.sendall(b"a: b\r\n" * 1000)


GOOD = {"good": _sent(b'{"scores": [0.5]}'), "more": _sent(b'{"scores": [0.5], "more": [1]}')}
BAD: dict[str, Answer] = {
    "huge integer": _sent(b'{"scores": [1' + b"0" * 400 + b"]}"),
    "integer without end": _sent(b'{"scores": [1' + b"0" * 100_000 + b"]}"),
    "deep JSON": _sent(b'{"scores": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "NaN": _sent(b'{"scores": [NaN]}'),
    "infinite": _sent(b'{"scores": [1e999]}'),
    "text": _sent(b'{"scores": ["1"]}'),
    "null": _sent(b'{"scores": [null]}'),
    "too few": _sent(b'{"scores": []}'),
    "too many": _sent(b'{"scores": [1, 2]}'),
    "no object": _sent(b"[1]"),
    "no JSON": _sent(b"\xff\xfe{"),
    "surrogate": _sent(b'{"scores": ["\\ud800"]}'),
    "bad gzip": _sent(b"\x1f\x8b\x08rubbish", "content-encoding: gzip"),
    "gzip bomb": _sent(gzip.compress(b" " * 2**24), "content-encoding: gzip"),
    "cut in the head": _raw(b"HTTP/1.1 200 OK\r\ncontent-le"),
    "cut in the body": _sent(b'{"scores"', length=100),
    "cut at once": _raw(b""),
    "no HTTP": _raw(b"SSH-2.0-OpenSSH\r\n"),
    "bad chunks": _raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}"),
    "silence": _silence,
    "drip": _drip,
    "headers for ever": _headers_for_ever,
    "400": _sent(b"", status="400 Bad Request"),
    "500": _sent(b"", status="500 Oops"),
    "no status": _raw(b"HTTP/1.1 999999 ?\r\n\r\n"),
}


@contextmanager
def strange_service() -> Iterator[str]:
    """Serve until the end of the block; every connection is for one request."""
    is_over = threading.Event()
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while not is_over.is_set():
            with suppress(OSError):
                connection, _ = server.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError):
            (GOOD | BAD)[_asked(connection)](connection, is_over)
            connection.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/score"
    finally:
        is_over.set()
        # Wakes up the one that accepts.
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def _asked(connection: socket.socket) -> str:
    with connection.makefile("rb") as stream:
        length = 0
        while line := stream.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return str(json.loads(stream.read(length))["completions"][0])

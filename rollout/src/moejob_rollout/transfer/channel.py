"""The connection of a worker to the store of rank 0, which admits only clients that prove a key of the job's secret.

torch's TCPStore can prove nothing. So it connects to a port of this process's loopback. Another connection carries its
bytes to rank 0, after both ends have proved that they know the key, as in moejob_api.contract.handshake.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from threading import Thread

from moejob_api.contract.addresses import LOOPBACK
from moejob_api.contract.handshake import NONCE_BYTES, PROOF_BYTES, client_proof, is_equal, server_proof

_CONNECT_SECONDS = 20.0
_PART_BYTES = 1 << 16


class UnprovenPeer(ConnectionError):
    """The other end and this one do not know the same key."""


def open_carrier(host: str, port: int, key: bytes, on_end: Callable[[], None]) -> int:
    """Return a port of loopback that carries the first connection to it to rank 0, and none after it.

    The callback runs in another thread when that connection has ended, from either side.
    """
    far = _connect_proven(host, port, key)
    near = socket.create_server((LOOPBACK, 0), backlog=1)
    # The store connects at once, or has failed.
    near.settimeout(_CONNECT_SECONDS)
    local_port: int = near.getsockname()[1]
    Thread(target=_carry_connection, args=(near, far, on_end), name="weights store", daemon=True).start()
    return local_port


def _connect_proven(host: str, port: int, key: bytes) -> socket.socket:
    peer = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
    try:
        _prove_key(peer, key)
    except OSError as error:
        peer.close()
        raise UnprovenPeer(f"{host}:{port} and this engine do not know one key: {error}") from None
    peer.settimeout(None)
    return peer


def _prove_key(peer: socket.socket, key: bytes) -> None:
    server_nonce, client_nonce = _read_exactly(peer, NONCE_BYTES), os.urandom(NONCE_BYTES)
    peer.sendall(client_nonce + client_proof(key, server_nonce, client_nonce))
    if not is_equal(_read_exactly(peer, PROOF_BYTES), server_proof(key, server_nonce, client_nonce)):
        raise ConnectionError("its proof is wrong")


def _read_exactly(peer: socket.socket, size: int) -> bytes:
    content = peer.recv(size, socket.MSG_WAITALL)
    if len(content) != size:
        raise ConnectionError("it has closed the connection")
    return content


def _carry_connection(listening: socket.socket, far: socket.socket, on_end: Callable[[], None]) -> None:
    try:
        with far, suppress(TimeoutError):
            with listening:
                near, _ = listening.accept()
            with near:
                back = Thread(target=_carry_bytes, args=(far, near), name="weights store", daemon=True)
                back.start()
                _carry_bytes(near, far)
                back.join()
    finally:
        on_end()


def _carry_bytes(source: socket.socket, sink: socket.socket) -> None:
    """Carry bytes one way until either side ends, then end both."""
    with suppress(OSError):
        while content := source.recv(_PART_BYTES):
            sink.sendall(content)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

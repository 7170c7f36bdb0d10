"""The port of rank 0 in front of its store, as the trainer's: it asks for a proof and carries bytes after it."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from threading import Thread

from moejob_api.contract.handshake import NONCE_BYTES, PROOF_BYTES, client_proof, server_proof


def opened(key: bytes, to: int, most: int | None = None) -> int:
    """Return a port that lets in those who know the key, at most as many of them as a number says."""
    listening = socket.create_server(("127.0.0.1", 0))
    Thread(target=_serve, args=(listening, key, to, most), daemon=True).start()
    port: int = listening.getsockname()[1]
    return port


def _serve(listening: socket.socket, key: bytes, to: int, most: int | None) -> None:
    admitted = 0
    while True:
        peer, _ = listening.accept()
        ours = os.urandom(NONCE_BYTES)
        peer.sendall(ours)
        said = peer.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
        theirs, proof = said[:NONCE_BYTES], said[NONCE_BYTES:]
        if proof != client_proof(key, ours, theirs) or admitted == most:
            peer.close()
            continue
        admitted += 1
        peer.sendall(server_proof(key, ours, theirs))
        inner = socket.create_connection(("127.0.0.1", to))
        for ends in ((peer, inner), (inner, peer)):
            Thread(target=_carry, args=ends, daemon=True).start()


def _carry(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while content := source.recv(65536):
            sink.sendall(content)
        sink.shutdown(socket.SHUT_RDWR)

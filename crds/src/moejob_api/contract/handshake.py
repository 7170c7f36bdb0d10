"""The proof by which both ends of a connection show that they know one key. Pure.

The server sends a nonce S, the client answers with a nonce C and HMAC(key, "client" S C), the server with
HMAC(key, "server" C S). The key is never sent, nor anything that can be replayed.
"""

from __future__ import annotations

import hashlib
import hmac

NONCE_BYTES = 32
PROOF_BYTES = 32


def client_proof(key: bytes, of_server: bytes, of_client: bytes) -> bytes:
    """Return the proof of a client, given both nonces."""
    return hmac.digest(key, b"client" + of_server + of_client, hashlib.sha256)


def server_proof(key: bytes, of_server: bytes, of_client: bytes) -> bytes:
    """Return the proof of a server, given both nonces."""
    return hmac.digest(key, b"server" + of_client + of_server, hashlib.sha256)


def is_equal(proof: bytes, expected: bytes) -> bool:
    """Compare in a time that tells nothing of how near a guess is."""
    return hmac.compare_digest(proof, expected)

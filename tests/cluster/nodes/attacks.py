"""A program for a pod: tries to reach others and to talk them into something, and says as JSON what came of it.

Runs by `python -c` in any image with Python, so it imports the standard library only. Its argument is a list of tries,
each a list of a verb, a host and a port; for what is on a volume, of a verb, a folder and a number.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

SECONDS = 10
# More than any port of a job lets in that have proved nothing.
CROWD = 300
CROWD_LOOK_SECONDS = 0.1
# Ends a crowd.
ENOUGH = Path("/tmp/enough")
# What torch's TCPStore says first, and its compare_set.
VALIDATE, MAGIC, COMPARE_SET = 0, 0x3C85F7CE, 2
END = b'{"pod":1,"token":"a stranger","cause":"BadConfiguration","message":"gone for good"}'


def connect(host: str, port: int) -> str:
    """Say whether a connection opens, and the kernel's word for why not."""
    try:
        with socket.create_connection((host, port), timeout=SECONDS):
            return "open"
    except TimeoutError:
        return "ETIMEDOUT"
    except OSError as refused:
        return errno.errorcode.get(refused.errno or 0, str(refused))


def end_the_job(host: str, port: int) -> str:
    """Write into a store, as a client of torch's would, that the configuration is bad."""
    fields = b"".join(struct.pack("<Q", len(text)) + text for text in (b"round/0/end", b"", END))
    return _exchange_bytes(host, port, struct.pack("<BIB", VALIDATE, MAGIC, COMPARE_SET) + fields)


def guess(host: str, port: int) -> str:
    """Prove to a launcher that one knows a secret which one does not know."""
    return _exchange_bytes(host, port, os.urandom(64) + struct.pack(">I", 64) + END)


def post(host: str, port: int) -> str:
    """Give an HTTP port an order."""
    return _post_request(host, port, "/progress")


def ask(host: str, port: int) -> str:
    """Have an engine generate."""
    return _post_request(host, port, "/inference/v1/generate")


def give_weights(host: str, port: int) -> str:
    """Have an engine take other weights."""
    return _post_request(host, port, "/update_weights")


def _post_request(host: str, port: int, path: str) -> str:
    """Return the first line of the answer, to a request with a key of a job that is not."""
    head = f"POST {path} HTTP/1.1\r\nHost: pod\r\nAuthorization: Bearer {'0' * 64}\r\nContent-Length: 2\r\n\r\n"
    with socket.create_connection((host, port), timeout=SECONDS) as peer:
        peer.sendall(head.encode() + b"{}")
        return peer.recv(64).decode().partition("\r\n")[0]


def _exchange_bytes(host: str, port: int, words: bytes) -> str:
    """Return how many bytes came back until the other side closed."""
    received = 0
    with socket.create_connection((host, port), timeout=SECONDS) as peer:
        peer.sendall(words)
        try:
            while chunk := peer.recv(4096):
                received += len(chunk)
        except ConnectionResetError:
            pass
        except TimeoutError:
            return f"{received} bytes and still open"
    return f"closed after {received} bytes"


def claim(folder: str, attempt: int) -> str:
    """Claim a run folder as a start of a later attempt would, without a proof; return all claims that are there."""
    (Path(folder) / f"{attempt:010d}.{attempt:010d}").touch()
    return " ".join(sorted(path.name for path in Path(folder).iterdir()))


def crowd(host: str, port: int) -> str:
    """Hold as many silent connections as there is no room for, and open another for each that is closed."""
    peers: list[socket.socket] = []
    opened = 0
    while not ENOUGH.exists():
        peers = [peer for peer in peers if _is_open(peer)]
        while len(peers) < CROWD:
            try:
                peers.append(socket.create_connection((host, port), timeout=SECONDS))
            except OSError:
                # Nothing listens there yet.
                break
            opened += 1
        time.sleep(CROWD_LOOK_SECONDS)
    return f"opened {opened}"


def _is_open(peer: socket.socket) -> bool:
    with suppress(BlockingIOError):
        try:
            if peer.recv(64, socket.MSG_DONTWAIT):
                return True
        except (ConnectionError, TimeoutError):
            pass
        peer.close()
        return False
    return True


VERBS = {each.__name__: each for each in (connect, end_the_job, guess, post, ask, give_weights, claim, crowd)}

if __name__ == "__main__":
    answers = [VERBS[verb](host, port) for verb, host, port in json.loads(sys.argv[1])]
    sys.stdout.write(json.dumps(answers))

"""A program for a pod of a job that means harm to the operator: it is ready, and answers /progress with what it likes.

Runs by `python -c` in any image with Python, so it imports the standard library only. $CHATTER says which it is: flood,
interim answers without end, or strange, answers in turns that no launcher gives, and at the end a strange last word.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

PORT = 9400
OK = b"HTTP/1.1 200 OK\r\n\r\n"
INTERIM = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 1000
TITLE, RED = "\x1b]0;taken over\x07", "\x1b[2J\x1b[31m"
WORDS = f"{TITLE}{RED}all is well\u202e\r\n"
HUGE = b"9" * 4000
FAULT = {"outcome": "RankFailed", "message": WORDS, "rank": 0}
PROGRESS = {"attempt": 1, "index": 0, "ready": True, "restarts": 1, "fault": FAULT}
LAST_WORD = {"outcome": "BadConfiguration", "message": WORDS}
ANSWERS = (
    json.dumps(PROGRESS | {"run": {"step": 3, "measures": {WORDS: 1.0}}}).encode(),
    b'{"attempt": 1, "index": 0, "ready": true, "run": {"step": ' + HUGE + b"}}",
    b'{"attempt": ' + HUGE + b', "index": -' + HUGE + b', "run": {"step": 1e999, "loss": -1e999}}',
    b"[" * 50_000,
)


def flood() -> Iterator[bytes]:
    """Interim answers, and never one that counts."""
    yield from itertools.repeat(INTERIM)


def strange(number: int) -> Iterator[bytes]:
    """Yield one answer in its turn; past the last of them the pod ends, with a word of its own."""
    if number >= len(ANSWERS):
        Path("/dev/termination-log").write_text(json.dumps(LAST_WORD))
        os._exit(78)
    yield OK + ANSWERS[number]


def serve(peer: socket.socket, numbers: Iterator[int], kind: str) -> None:
    with peer, suppress(OSError):
        if b"/progress" not in peer.recv(4096):
            peer.sendall(OK)
            return
        number = next(numbers)
        sys.stdout.write(f"asked {number}\n")
        sys.stdout.flush()
        for piece in flood() if kind == "flood" else strange(number):
            peer.sendall(piece)


def main(kind: str) -> None:
    numbers = itertools.count()
    with socket.create_server(("", PORT)) as listening:
        while True:
            peer, _ = listening.accept()
            Thread(target=serve, args=(peer, numbers, kind), daemon=True).start()


if __name__ == "__main__":
    main(os.environ["CHATTER"])

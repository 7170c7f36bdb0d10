"""Answers of engines: read whole, and no further than any of ours would go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from moejob_trainer.rollouts import connection
from moejob_trainer.rollouts.connection import EngineConnection, EngineLost

LIMIT = 100_000


class _Answers(BaseHTTPRequestHandler):
    """Says as many bytes as its path names."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            for _ in range(int(self.path[1:]) // 1000):
                self.wfile.write(b" " * 1000)
        except ConnectionError:
            return

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineConnection]:
    monkeypatch.setattr(connection, "_ANSWER_BYTES", LIMIT)
    made = EngineConnection(None)
    yield made
    made.close()


def test_an_answer_is_read_whole(asking: EngineConnection, url: str) -> None:
    assert len(asking.run(asking.get(f"{url}/{LIMIT}", 60))) == LIMIT


def test_an_answer_that_no_engine_gives_is_not_read_to_its_end(asking: EngineConnection, url: str) -> None:
    with pytest.raises(EngineLost, match="more than 100000 bytes"):
        asking.run(asking.get(f"{url}/{10 * LIMIT}", 60))

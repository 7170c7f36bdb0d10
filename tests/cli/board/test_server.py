"""The server answers this machine's browser with parts of run folders, and nothing else."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.board.made_runs import make_run
from moejob_api.problems import InvalidSpec
from moejob_cli.board.commands import open_runs, serve_board
from moejob_cli.board.one_file import thin_curve
from moejob_cli.board.page import script_text
from moejob_cli.board.server import BoardServer


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BoardServer]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_run(tmp_path / "runs" / "one")
    opened = serve_board([tmp_path / "runs"], 0)
    threading.Thread(target=opened.serve_forever, daemon=True).start()
    yield opened
    opened.shutdown()
    opened.server_close()


def ask(server: BoardServer, path: str, host: str | None = None, method: str = "GET") -> tuple[int, bytes, str]:
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=20)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers.get("Content-Security-Policy", "")


def test_the_page_has_a_policy_without_any_other_host(server: BoardServer) -> None:
    status, page, policy = ask(server, "/")
    assert status == 200
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert b"src=" not in page.replace(b"{src=", b"")


def test_a_name_of_a_stranger_for_this_machine_is_refused(server: BoardServer) -> None:
    assert ask(server, "/api/runs", host="attacker.example:80")[0] == 403


@pytest.mark.parametrize(
    "path",
    [
        "/api/run?run=7",
        "/api/run?run=-1",
        "/api/run?run=%C2%B2",
        "/api/run",
        "/run.secret",
        "/../../etc/passwd",
    ],
)
def test_what_is_no_part_of_a_run_is_not_there(server: BoardServer, path: str) -> None:
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize("name", ["../run.json", "..%2Frun.json", "step-1.jsonl", "link", "step-5.jsonl"])
def test_no_other_file_is_read_as_samples(server: BoardServer, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text('{"answer": "secret"}\n')
    (tmp_path / "runs" / "one" / "samples" / "step-5.jsonl").symlink_to(tmp_path / "secret")
    assert ask(server, f"/api/samples?run=0&file={name}")[:2] == (200, b"[]")


def test_nothing_is_changed_by_a_request(server: BoardServer, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    for path in (
        "/",
        "/api/runs",
        "/api/run?run=0",
        "/api/curve?run=0&name=loss",
        "/api/samples?run=0&file=step-10.jsonl",
    ):
        assert ask(server, path)[0] == 200
    assert ask(server, "/api/runs", method="POST")[0] == 501
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before


def test_details_have_the_failure_with_its_cost(server: BoardServer) -> None:
    details = json.loads(ask(server, "/api/run?run=0")[1])
    (failure,) = details["ledger"]["failures"]
    assert (failure["step"], failure["repeated_steps"]) == (37, 7)
    assert details["nodes"][1]["node"] == "gpu-node-4"


def test_a_folder_without_runs_is_refused_with_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="holds no run; name a run folder"):
        open_runs([tmp_path])


def test_a_thinned_curve_keeps_its_extremes_and_ends() -> None:
    values = [float(number % 97) for number in range(100_000)]
    values[31_337] = 1e9
    kept = thin_curve(values, 1_000)
    assert len(kept) <= 1_002
    assert {0, 31_337, 99_999} <= set(kept)
    assert thin_curve([1.0, float("nan"), 2.0], 10) == [0, 2]


def test_no_string_of_a_run_ends_the_element_of_the_data() -> None:
    text = script_text({"answer": "</script><script>alert(1)</script><!--"})
    assert "<" not in text
    assert json.loads(text) == {"answer": "</script><script>alert(1)</script><!--"}

"""The page in a real browser: what it shows is what the files say, and nothing in a run harms it."""

from __future__ import annotations

import json
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chromium import PROGRAM, Chromium
from cli.board.made_runs import HOSTILE, make_run, write_long_run
from moejob_cli.board.commands import open_runs, serve_board, write_report
from moejob_cli.board.server import BoardServer

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs chromium of Debian")

VIEWS = ("Curves", "Timeline", "Samples", "Experts", "Layout", "Job", "Compare")
LONG = 100_000


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


class Board:
    """A board that serves until the test ends."""

    def __init__(self, *folders: Path) -> None:
        self.server: BoardServer = serve_board(folders, 0)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self) -> str:
        return self.server.url

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def complaints(browser: Chromium) -> list[Any]:
    """Return errors of the page, and of its policy, since the last call."""
    texts = [each for each in browser.events if each.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown")]
    browser.events.clear()
    return texts


@pytest.mark.parametrize(("width", "is_phone"), [(1280, False), (390, True)], ids=["desk", "phone"])
def test_runs_of_a_sweep_and_their_values_are_readable_in_full(
    browser: Chromium, tmp_path: Path, width: int, is_phone: bool
) -> None:
    names = ["tiny-sft-lr-0-001", "tiny-sft-lr-0-003", "tiny-sft-lr-0-01-router-coefficient-0-02"]
    for name in names:
        make_run(tmp_path / name, name=name)
    cut = "[...document.querySelectorAll('.run .name, .card output')].filter(e => e.scrollWidth > e.clientWidth).length"
    with Board(*(tmp_path / name for name in names)) as url:
        browser.resize(width, 844, is_phone=is_phone)
        browser.open(f"{url}#curves-0+1+2")
        browser.wait_for("document.querySelectorAll('canvas').length > 8")
        assert browser.evaluate(cut) == 0
        # The last view, whose name is beyond the edge of a phone.
        browser.press("ArrowLeft")
        browser.wait_for("document.body.dataset.ready === 'Compare'")
        edge = browser.evaluate("document.querySelector('#tabs [aria-selected=true]').getBoundingClientRect().right")
        assert 0 < edge <= width
    browser.resize(1280, 800)


def test_every_view_of_served_runs_and_of_a_file_opens_without_a_complaint(browser: Chromium, tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    make_run(tmp_path / "two", name="second", training={"maxSteps": 90})
    write_report([tmp_path / "one", tmp_path / "two"], tmp_path / "report.html")
    with Board(tmp_path) as url:
        for address in (url, (tmp_path / "report.html").as_uri()):
            browser.open(address)
            browser.wait_for("document.querySelectorAll('canvas').length > 8")
            shown = []
            for view in VIEWS:
                browser.wait_for(f"document.body.dataset.ready === {view!r}")
                shown.append(browser.evaluate("document.getElementById('view').innerText"))
                browser.press("ArrowRight")
            assert "gpu-node-4" in shown[1]
            assert "\t1\t37\trank 5 ended with exit code 1: ValueError: loss is not finite" in shown[1]
            assert "Ada has 37 apples" in shown[2]
            assert "steps 1 to 199" in shown[3]
            assert "Pod 1 on gpu-node-4" in shown[4]
            assert "maxSteps" in shown[5]
            assert complaints(browser) == []


def test_two_runs_are_compared_by_the_fields_of_their_jobs(browser: Chromium, tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    make_run(tmp_path / "two", name="second", training={"maxSteps": 90})
    with Board(tmp_path) as url:
        browser.open(url)
        browser.evaluate("toggle(1)")
        browser.wait_for("document.querySelector('#view').innerText.includes('2 runs overlaid')")
        browser.press("ArrowLeft")
        browser.wait_for("document.body.dataset.ready === 'Compare'")
        assert browser.evaluate("[...document.querySelectorAll('td:first-child')].map((cell) => cell.textContent)") == [
            "training.maxSteps"
        ]


def test_runs_that_are_named_are_overlaid_from_the_start(browser: Chromium, tmp_path: Path) -> None:
    for number, name in enumerate(("first", "second", "third")):
        make_run(tmp_path / name, 60, name=name, training={"maxSteps": 90 + number})
    write_report([tmp_path / "first", tmp_path / "third"], tmp_path / "report.html")
    server = serve_board([tmp_path], 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        # The file comes between them: a browser does not load a page again for another part of its address.
        for address, words in (
            (server.overlay_url, "3 runs overlaid"),
            ((tmp_path / "report.html").as_uri(), "2 runs overlaid"),
        ):
            browser.open(address)
            browser.wait_for(f"document.querySelector('#view').innerText.includes({words!r})")
            assert complaints(browser) == []
        browser.open(f"{server.url}#compare-2+0", "Compare")
        heads = browser.evaluate("[...document.querySelectorAll('th')].map((cell) => cell.textContent)")
        assert heads == ["field", "third", "first"]
    finally:
        server.shutdown()
        server.server_close()


def test_values_under_the_pointer_are_those_of_the_step_log(browser: Chromium, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", 150)
    values = {line["step"]: line["loss"] for line in map(json.loads, (folder / "steps.jsonl").read_text().splitlines())}
    with Board(folder) as url:
        browser.open(url)
        browser.wait_for("document.querySelectorAll('canvas').length > 8")
        place = json.loads(browser.evaluate("JSON.stringify(document.querySelector('canvas').getBoundingClientRect())"))
        seen = {}
        for share in (0.25, 0.4, 0.61, 0.8, 0.95):
            browser.mouse("mouseMoved", place["left"] + share * place["width"], place["top"] + 40)
            shown = "document.querySelector('.card output span')"
            browser.wait_for(f"{shown}.textContent.startsWith('step')")
            data = browser.evaluate(f"[{shown}.dataset.step, {shown}.dataset.value]")
            seen[int(data[0])] = float(data[1])
        assert len(seen) == 5
        assert seen == {step: values[step] for step in seen}


def test_dragging_zooms_every_curve_and_a_double_click_shows_all(browser: Chromium, tmp_path: Path) -> None:
    with Board(make_run(tmp_path / "one", 150)) as url:
        browser.open(url)
        browser.wait_for("document.querySelectorAll('canvas').length > 8")
        place = json.loads(browser.evaluate("JSON.stringify(document.querySelector('canvas').getBoundingClientRect())"))
        left, top = place["left"], place["top"] + 40
        browser.mouse("mousePressed", left + 150, top)
        browser.mouse("mouseMoved", left + 250, top)
        browser.mouse("mouseReleased", left + 250, top)
        begin, end = browser.evaluate("state.zoom")
        assert 1 < begin < end < 150
        browser.evaluate("document.querySelector('canvas').dispatchEvent(new MouseEvent('dblclick'))")
        assert browser.evaluate("state.zoom") is None


def test_a_hostile_run_harms_nothing(browser: Chromium, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", name=HOSTILE)
    rows = [{"step": 99, "prompt": HOSTILE, "answer": "y" * 1_000_000 + HOSTILE, "reward": 1, HOSTILE: HOSTILE}]
    (folder / "samples" / "step-99.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "no json\n")
    with (folder / "steps.jsonl").open("a") as file:
        file.write(json.dumps({"step": 400, "loss": 1.0, HOSTILE: 1.0}) + "\n")
    (folder / "spec.json").write_text(json.dumps({HOSTILE: [HOSTILE]}))
    write_report([folder], tmp_path / "report.html")
    assert "\x1b" not in (tmp_path / "report.html").read_text()
    with Board(folder) as url:
        for address in (url, (tmp_path / "report.html").as_uri()):
            browser.open(address)
            for view in VIEWS:
                browser.wait_for(f"document.body.dataset.ready === {view!r}")
                assert browser.evaluate("document.querySelectorAll('img, script[src], iframe').length") == 0
                if view == "Samples":
                    text = browser.evaluate("document.getElementById('view').innerText")
                    assert "<script>document.title='owned'</script>" in text
                    assert "\\x1b[2J\\u202e" in text
                    assert len(text) < 60_000
                    assert "more characters in the file" in text
                browser.press("ArrowRight")
            assert "owned" not in browser.evaluate("document.title.replaceAll(/document.title='owned'/g, '')")
            assert complaints(browser) == []


def test_the_policy_refuses_other_programs_and_other_hosts(browser: Chromium, tmp_path: Path) -> None:
    with Board(make_run(tmp_path / "one")) as url:
        browser.open(url)
        browser.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
        )
        assert browser.evaluate("window.ran === undefined")
        assert browser.evaluate("fetch('http://localhost:9/').then(() => 'went', () => 'refused')") == "refused"
        assert any("Content Security Policy" in json.dumps(each) for each in complaints(browser))
        requests = [
            each["params"]["request"]["url"]
            for each in browser.events
            if each.get("method") == "Network.requestWillBeSent"
        ]
        assert all(address.startswith(url) for address in requests)


def test_a_run_that_was_killed_and_a_run_that_has_not_begun_open(browser: Chromium, tmp_path: Path) -> None:
    killed = make_run(tmp_path / "killed", 80)
    (path,) = killed.glob("record/*/pod-00000.jsonl")
    path.write_bytes(path.read_bytes()[:-40])
    with (killed / "steps.jsonl").open("a") as file:
        file.write('{"step": 81, "lo')
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "run.json").write_text("{")
    with Board(tmp_path) as url:
        browser.open(url)
        assert browser.evaluate("state.runs.map((run) => [run.name, run.step])") == [["empty", None], ["qwen3-sft", 80]]
        for _ in VIEWS:
            browser.press("ArrowRight")
        browser.press("ArrowDown")
        browser.wait_for("document.querySelectorAll('canvas').length > 8")
        assert complaints(browser) == []


def test_a_hundred_thousand_steps_are_painted_within_a_second(browser: Chromium, tmp_path: Path) -> None:
    folder = write_long_run(tmp_path / "long", LONG)
    assert 60e6 < (folder / "steps.jsonl").stat().st_size < 66e6
    began = time.process_time()
    assert open_runs([folder])[0].summary()["rows"] == LONG
    first_read_seconds = time.process_time() - began
    with Board(folder) as url:
        browser.open(url)
        paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        curve = (
            "new Promise((done) => loadCurve(0, 'loss').then((curve) => done([curve.x.length, curve.levels.length])))"
        )
        assert browser.evaluate(curve) == [LONG, 2]
        assert browser.evaluate(paint) < 1_000
    assert first_read_seconds < 8
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 600 * 1024

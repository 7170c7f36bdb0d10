"""The record of a run: what a launcher leaves in the run folder outlives its pod."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from moejob_api.contract.pods import Environment
from moejob_api.contract.record import RecordEvent, RunEventKind, attempt_folder_name, read_record_lines, record_line
from moejob_trainer.launcher.pod import TrainerPod
from moejob_trainer.launcher.record import MOST_ATTEMPTS, LauncherRecord, RecordFile, last_lines
from moejob_trainer.runtime.redaction import REDACTED, Redaction
from trainer.launcher.launchers import Gang, await_result

Make = Callable[..., Gang]
OWNER = {"job": "job", "uid": "1234"}


def record_path(folder: Path, attempt: int = 1, pod: int = 0) -> Path:
    return folder / "record" / attempt_folder_name(attempt) / f"pod-{pod:05d}.jsonl"


def read_events(folder: Path, attempt: int = 1, pod: int = 0) -> list[RecordEvent]:
    return [*read_record_lines(record_path(folder, attempt, pod).read_bytes().splitlines())]


def kinds(events: list[RecordEvent]) -> list[RunEventKind]:
    return [event.kind for event in events]


def own(folder: Path, **owner: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(OWNER | owner))
    return folder


def pod_of(gang: Gang, **settings: str) -> TrainerPod:
    variables = gang.pod_environment(0, 1) | {"MOEJOB_PROGRESS_PORT": "1"} | settings
    values = {name.name.lower(): variables[name] for name in Environment if name in variables}
    return TrainerPod.model_validate(values)


def test_a_failure_is_recorded_with_its_rank_its_traceback_and_each_decision(gang: Make) -> None:
    job = gang()
    assert job.start("fail").exit_code() == 1
    events = read_events(job.run_folder)
    assert kinds(events).count(RunEventKind.RANKS_STARTED) == 3
    assert kinds(events).count(RunEventKind.RESTARTING) == 2
    assert (events[0].kind, events[0].ranks, events[0].host) == (RunEventKind.LAUNCHER_STARTED, (0, 1), "127.0.0.1")
    failure = next(event for event in events if event.kind is RunEventKind.RANKS_FAILED)
    assert (failure.rank, failure.exit_code, failure.restart, failure.state) == (1, 1, 0, "RankFailed")
    blamed = next(event for event in events if event.kind is RunEventKind.LAST_LINES)
    assert blamed.rank == 1
    assert "Traceback (most recent call last):" in blamed.lines
    assert blamed.lines[-1] == "ValueError: loss is not finite"
    assert (events[-1].kind, events[-1].state, events[-1].exit_code) == (RunEventKind.LAUNCHER_ENDED, "RankFailed", 1)


def test_a_run_that_ends_well_is_recorded_with_its_last_lines(gang: Make) -> None:
    job = gang()
    assert job.start("finish").exit_code() == 0
    events = read_events(job.run_folder)
    assert [(event.rank, event.lines) for event in events if event.kind is RunEventKind.LAST_LINES] == [
        (0, ("hello from 0",)),
        (1, ("hello from 1",)),
    ]
    assert events[-1].state == "Completed"


def test_ranks_that_hang_leave_the_stacks_of_all_of_them_before_they_are_killed(gang: Make) -> None:
    job = gang(progress_deadline=8)
    launcher = job.start("work")
    job.await_start_notes(restart=1)
    stacks = {
        event.rank: event.lines
        for event in await_result(lambda: lines_of_round(job.run_folder, 0), "stacks")
        if event.restart == 0
    }
    assert sorted(rank for rank in stacks if rank is not None) == [0, 1]
    for lines in stacks.values():
        assert any("in for_ever" in line for line in lines), lines
    launcher.kill()


def lines_of_round(folder: Path, restart: int) -> list[RecordEvent]:
    events = [
        event for event in read_events(folder) if event.kind is RunEventKind.LAST_LINES and event.restart == restart
    ]
    return events if len(events) == 2 else []


def test_a_kill_of_every_process_of_a_pod_leaves_a_record_that_can_be_read(gang: Make) -> None:
    job = gang()
    launcher = job.start("work")
    job.await_start_notes()
    await_result(lambda: record_path(job.run_folder).exists(), "the record")
    await_result(lambda: RunEventKind.RANKS_STARTED in kinds(read_events(job.run_folder)), "the start")
    launcher.kill()
    assert RunEventKind.LAUNCHER_ENDED not in kinds(read_events(job.run_folder))
    with record_path(job.run_folder).open("ab") as file:
        file.write(b'{"time":1,"kin')
    again = job.start("work")
    await_result(lambda: kinds(read_events(job.run_folder)).count(RunEventKind.LAUNCHER_STARTED) == 2, "a second start")
    assert b'"kin\n' not in record_path(job.run_folder).read_bytes()
    again.signal(signal.SIGKILL)


def test_secrets_of_the_pod_are_not_recorded(gang: Make) -> None:
    job = gang(ranks=1, secret="known-to-launchers-alone")
    assert job.start("fail_with_secrets").exit_code() == 1
    text = record_path(job.run_folder).read_text()
    assert REDACTED in text
    for secret in ("known-to-launchers-alone", "hf_abcdef", "hunter2"):
        assert secret not in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("key=abcdef123456 refused", f"key={REDACTED} refused", id="a value of the environment"),
        pytest.param("Bearer eyJhbGciOi.abc", f"Bearer {REDACTED}", id="a header"),
        pytest.param("http://a:b@host/x", f"http://{REDACTED}@host/x", id="an address"),
        pytest.param("AKIAABCDEFGHIJKLMNOP", REDACTED, id="an access key"),
        pytest.param("false alarm at http://host:80/x", "false alarm at http://host:80/x", id="none"),
    ],
)
def test_a_secret_is_cut_out_of_a_line(text: str, shown: str) -> None:
    redaction = Redaction({"WANDB_API_KEY": "abcdef123456", "TOKENIZERS_PARALLELISM": "false", "HOME": "alarm at"})
    assert redaction.redact_text(text) == shown


def test_nothing_is_written_into_the_folder_of_another_job(gang: Make) -> None:
    job = gang()
    own(job.run_folder, uid="another")
    assert job.start("finish").exit_code() == 78
    assert not (job.run_folder / "record").exists()


def test_a_record_that_cannot_be_written_holds_up_no_run(gang: Make) -> None:
    job = gang()
    job.run_folder.mkdir()
    (job.run_folder / "record").write_text("in the way")
    launcher = job.start("finish")
    assert launcher.exit_code() == 0
    assert "the record of the run is not written any more" in launcher.log.read_text()


def test_a_full_record_keeps_events_and_leaves_lines_out(gang: Make) -> None:
    job = gang()
    own(job.run_folder)
    file = RecordFile(pod_of(job), most_bytes=8_000)
    lines = RecordEvent(time=1, kind=RunEventKind.LAST_LINES, rank=0, lines=("x" * 3_000,))
    file.write_events([lines] * 4)
    for _ in range(200):
        file.write_events([RecordEvent(time=2, kind=RunEventKind.RESTARTING)])
    events = read_events(job.run_folder)
    assert kinds(events)[:4] == [RunEventKind.LAST_LINES, RunEventKind.LAST_LINES, RunEventKind.FULL, RunEventKind.FULL]
    assert kinds(events)[4] is RunEventKind.RESTARTING
    assert file.path.stat().st_size <= 9_000


def test_old_attempts_are_removed_and_the_first_is_kept(gang: Make) -> None:
    job = gang()
    folder = own(job.run_folder) / "record"
    for attempt in range(1, MOST_ATTEMPTS + 10):
        (folder / attempt_folder_name(attempt)).mkdir(parents=True)
    (folder / "notes").mkdir()
    newest = MOST_ATTEMPTS + 10
    RecordFile(pod_of(job, MOEJOB_ATTEMPT=str(newest))).write_events([RecordEvent(time=1, kind=RunEventKind.PHASE)])
    kept = sorted(path.name for path in folder.iterdir() if path.name != "notes")
    assert len(kept) == MOST_ATTEMPTS
    assert kept[0] == attempt_folder_name(1)
    assert kept[-1] == attempt_folder_name(newest)
    assert (folder / "notes").exists()


def test_a_record_is_readable_by_its_user_alone(gang: Make) -> None:
    job = gang()
    own(job.run_folder)
    file = RecordFile(pod_of(job))
    file.write_events([RecordEvent(time=1, kind=RunEventKind.PHASE)])
    paths = (file.path.parent.parent, file.path.parent, file.path)
    assert [path.stat().st_mode & 0o077 for path in paths] == [0, 0, 0]


def test_events_wait_until_the_folder_belongs_to_the_job(gang: Make) -> None:
    job = gang()
    job.run_folder.mkdir()
    file = RecordFile(pod_of(job))
    record = LauncherRecord(file, Redaction({}))
    record.add(RunEventKind.LAUNCHER_STARTED)
    assert not file.path.exists()
    own(job.run_folder)
    record.close()
    assert kinds(read_events(job.run_folder)) == [RunEventKind.LAUNCHER_STARTED]


def test_the_last_lines_that_fit_are_kept() -> None:
    assert last_lines(["a" * 10, "b" * 10, "c" * 10], 22) == ("b" * 10, "c" * 10)
    assert len(last_lines(["x" * 5_000], 100)[0]) == 400
    assert last_lines([], 100) == ()


def test_words_of_a_rank_that_a_terminal_would_obey_are_recorded_as_spaces() -> None:
    event = RecordEvent(time=1, kind=RunEventKind.LAST_LINES, lines=("\x1b[2Jgone",))
    (event_read,) = read_record_lines([record_line(event).encode(), b"no json"])
    assert event_read.lines == (" [2Jgone",)

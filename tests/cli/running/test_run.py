"""`moejob run` as a person meets it: real processes, with a launcher that stands in for the trainer's."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.runs import DONE, STEPS, TWO_NODES, Act, Run, eventually
from moejob_api.contract.record import read_record_lines

MakeRun = Callable[..., Run]
SAVES: Act = ["saves_when_asked"]


def test_a_run_that_is_done_exits_0_and_says_where_everything_is(run: MakeRun) -> None:
    one = run()
    ended = one.run([[STEPS, DONE]])
    assert ended.code == 0, ended
    assert ended.stderr == ""
    assert "█" in ended.stdout
    assert "4.0000" in ended.stdout
    for name in ("logs", "steps.jsonl"):
        assert str(one.place / name) in ended.stdout
    assert "\x1b" not in ended.stdout


def test_a_launcher_is_told_what_the_contract_says(run: MakeRun) -> None:
    one = run(**TWO_NODES)
    one.run([[DONE]], [[DONE]], MOEJOB_ROLLOUT_URLS="left over from elsewhere")
    first, second = one.life(0, 0), one.life(1, 0)
    assert [variables["MOEJOB_HOST"] for variables in (first, second)] == ["127.0.0.1", "127.0.0.2"]
    assert [variables["MOEJOB_INDEX"] for variables in (first, second)] == ["0", "1"]
    for variables in (first, second):
        assert variables["MOEJOB_NODES"] == "2"
        assert variables["MOEJOB_RANKS_PER_NODE"] == "1"
        assert variables["MOEJOB_RENDEZVOUS_HOST"] == "127.0.0.1"
        assert variables["MOEJOB_RUN_FOLDER"] == str(one.place)
        assert json.loads(variables["MOEJOB_SPEC"])["training"]["maxSteps"] == 4
        assert "MOEJOB_ROLLOUT_URLS" not in variables
    for name in ("MOEJOB_UID", "MOEJOB_ATTEMPT", "MOEJOB_RENDEZVOUS_PORT", "MOEJOB_PROGRESS_PORT"):
        assert first[name] == second[name]


def test_what_the_job_sets_reaches_the_ranks(run: MakeRun) -> None:
    one = run(resources={"env": [{"name": "HF_HOME", "value": "/models"}]})
    assert one.run([[DONE]]).code == 0
    assert one.life(0, 0)["HF_HOME"] == "/models"


def test_a_run_in_the_same_folder_goes_on_as_the_same_job_under_the_next_attempt(run: MakeRun) -> None:
    one = run()
    one.run([[STEPS, DONE]])
    assert one.run([[["resumes", 2], ["steps", 2], DONE]]).code == 0
    before, after = one.life(0, 0), one.life(0, 1)
    assert after["MOEJOB_UID"] == before["MOEJOB_UID"]
    assert int(after["MOEJOB_ATTEMPT"]) == int(before["MOEJOB_ATTEMPT"]) + 1
    # By which a start knows the claims of those before it.
    assert after["MOEJOB_SECRET"] == before["MOEJOB_SECRET"]


def test_a_sweep_trains_a_run_of_each_value_in_a_folder_of_its_name(run: MakeRun) -> None:
    sweep = run()
    sweep.settings = ("training.maxSteps=4,5",)
    ended = sweep.run([[STEPS, DONE]])
    folders = [sweep.place / name for name in ("small-ms-4", "small-ms-5")]
    assert ended.code == 0, ended
    assert [len((folder / "steps.jsonl").read_text().splitlines()) for folder in folders] == [4, 4]
    assert [json.loads((folder / "run.json").read_text())["job"] for folder in folders] == ["small-ms-4", "small-ms-5"]
    assert f"`moejob board {folders[0]} {folders[1]}` overlays their curves" in ended.stderr


def test_a_run_of_a_sweep_that_fails_leaves_the_next_ones_alone(run: MakeRun) -> None:
    sweep = run()
    sweep.settings = ("training.maxSteps=4,5",)
    ended = sweep.run([[["ends", 78, "bad data"]]])
    assert ended.code == 78, ended
    assert ended.stderr.count("bad data") == 2
    assert (sweep.place / "small-ms-5" / "run.json").exists()


def test_a_sweep_of_which_one_job_is_refused_trains_none(run: MakeRun) -> None:
    sweep = run()
    sweep.settings = ("training.globalBatchSize=8,7", "training.microBatchSize=8")
    ended = sweep.run([[DONE]])
    assert ended.code == 1, ended
    assert not sweep.place.exists()


def test_a_launcher_that_ends_in_mid_answer_is_no_fault_of_the_run(run: MakeRun) -> None:
    assert run().run([[STEPS, ["breaks_off_answers"], DONE]]).code == 0


def test_the_secret_of_a_run_is_its_own_and_its_users_alone(run: MakeRun) -> None:
    one = run()
    one.run([[DONE]])
    kept = one.place / "run.secret"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert one.life(0, 0)["MOEJOB_SECRET"] == kept.read_text().strip()
    kept.chmod(0o644)
    one.run([[DONE]])
    assert kept.stat().st_mode & 0o777 == 0o600
    # Another run makes another.
    kept.unlink()
    one.run([[DONE]])
    assert one.life(0, 2)["MOEJOB_SECRET"] != one.life(0, 0)["MOEJOB_SECRET"]


def test_a_link_is_no_secret(run: MakeRun, tmp_path: Path) -> None:
    one, elsewhere = run(), tmp_path / "elsewhere"
    one.run([[DONE]])
    kept = one.place / "run.secret"
    kept.rename(elsewhere)
    elsewhere.chmod(0o644)
    kept.symlink_to(elsewhere)
    ended = one.run([[DONE]])
    assert ended.code == 78
    assert f"{kept} cannot be used as the secret of a run" in ended.stderr
    assert elsewhere.stat().st_mode & 0o777 == 0o644


def test_logs_are_their_users_alone_also_in_a_folder_that_was_open(run: MakeRun) -> None:
    one = run()
    one.run([[DONE]])
    logs = one.place / "logs"
    assert logs.stat().st_mode & 0o777 == 0o700
    logs.chmod(0o755)
    assert one.run([[DONE]]).code == 0
    assert logs.stat().st_mode & 0o777 == 0o700


def test_logs_are_not_written_through_a_link(run: MakeRun, tmp_path: Path) -> None:
    one, elsewhere = run(), tmp_path / "elsewhere"
    one.run([[DONE]])
    (one.place / "logs").rename(elsewhere)
    elsewhere.chmod(0o755)
    (one.place / "logs").symlink_to(elsewhere)
    ended = one.run([[DONE]])
    assert ended.code == 78
    assert f"{one.place / 'logs'} cannot be kept from other users: Not a directory; delete it" in ended.stderr
    assert elsewhere.stat().st_mode & 0o777 == 0o755


def test_a_damaged_secret_is_no_secret(run: MakeRun) -> None:
    one = run()
    one.run([[DONE]])
    (one.place / "run.secret").write_text("")
    ended = one.run([[DONE]])
    assert ended.code == 78
    assert f"{one.place / 'run.secret'} does not hold the secret of a run; delete it" in ended.stderr


def test_a_claim_that_another_wrote_keeps_no_run_from_going_on(run: MakeRun) -> None:
    one = run()
    one.run([[DONE]])
    (one.place / "claims/9999999999.9999999999").touch()
    assert one.run([[DONE]]).code == 0
    assert one.life(0, 1)["MOEJOB_ATTEMPT"] == "2"


# --- recovery ---------------------------------------------------------------------------------------------------------


def test_a_launcher_that_dies_is_replaced_while_the_others_stay(run: MakeRun) -> None:
    one = run(**TWO_NODES)
    ended = one.run([[["waits_for", "lives/1-1.json"], STEPS, DONE]], [[["was_heard"], ["is_killed"]], [DONE]])
    assert ended.code == 0, ended
    assert "its launcher was killed by signal 9; launcher 1 is replaced" in ended.stdout
    assert (one.lives(0), one.lives(1)) == (1, 2)
    assert one.life(1, 1)["MOEJOB_ATTEMPT"] == one.life(1, 0)["MOEJOB_ATTEMPT"]


def test_decisions_of_the_run_are_recorded_by_attempt(run: MakeRun) -> None:
    one = run()
    one.run([[STEPS, ["ends", 1]], [["resumes", 2], ["steps", 2], DONE]])
    record = one.place / "record"
    decisions = [
        event.message
        for path in sorted(record.glob("*/supervisor.jsonl"))
        for event in read_record_lines(path.read_bytes().splitlines())
    ]
    assert len([*record.glob("attempt-*")]) == 2
    assert "all ranks start again from the newest checkpoint" in decisions[0]
    assert decisions[-1] == "the run ends: done"


def test_pod_0_that_ends_is_replaced_while_the_others_stay(run: MakeRun) -> None:
    one = run(**TWO_NODES)
    ended = one.run([[["was_heard"], ["ends", 1, "boom"]], [STEPS, DONE]], [[["waits_for", "lives/0-1.json"], DONE]])
    assert ended.code == 0, ended
    assert "boom; launcher 0 is replaced" in ended.stdout
    assert (one.lives(0), one.lives(1)) == (2, 1)
    assert one.life(0, 1)["MOEJOB_ATTEMPT"] == one.life(0, 0)["MOEJOB_ATTEMPT"]


def test_a_launcher_that_keeps_ending_takes_all_to_the_next_attempt(run: MakeRun) -> None:
    one = run(**TWO_NODES)
    ends: list[Act] = [["was_heard"], ["ends", 1, "boom"]]
    ended = one.run([ends, ends, ends, [STEPS, DONE]], [[SAVES], [DONE]])
    assert ended.code == 0, ended
    assert "boom; all ranks start again" in ended.stdout
    assert [one.life(index, life)["MOEJOB_ATTEMPT"] for index, life in ((0, 3), (1, 1))] == ["2", "2"]


def test_ranks_that_were_restarted_in_place_are_told_of(run: MakeRun) -> None:
    ended = run().run([[["restarts_ranks"], ["was_heard"], STEPS, DONE]])
    assert ended.code == 0, ended
    assert "its ranks were restarted in place" in ended.stdout


def test_a_spent_budget_fails_the_run_with_the_last_word(run: MakeRun) -> None:
    one = run(lifecycle={"backoffLimit": 1})
    ended = one.run([[["ends", 1, "boom"]]])
    assert ended.code == 1
    assert "boom; 1 restarts since the last checkpoint, backoffLimit is 1" in ended.stderr
    assert one.lives(0) == 2


def test_a_new_checkpoint_forgives_what_failed_before_it(run: MakeRun) -> None:
    one = run(lifecycle={"backoffLimit": 1})
    saves_and_fails: list[list[Act]] = [
        [["resumes", step], ["steps", 1], ["saves"], ["was_heard"], ["ends", 1]] for step in range(3)
    ]
    ended = one.run([*saves_and_fails, [DONE]])
    assert ended.code == 0, ended
    assert one.lives(0) == 4


def test_a_bad_configuration_fails_the_run_at_once_with_78(run: MakeRun) -> None:
    one = run()
    ended = one.run([[["was_heard"], ["ends", 78, "data.jsonl, line 3 is no JSON"]]])
    assert ended.code == 78
    assert "error: data.jsonl, line 3 is no JSON" in ended.stderr
    assert one.lives(0) == 1
    assert "training" not in ended.stdout


# --- stopping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_a_run_that_is_asked_to_stop_saves(run: MakeRun, number: signal.Signals, code: int) -> None:
    one = run(**TWO_NODES)
    one.start([[STEPS, SAVES]], [[SAVES]])
    one.life(1, 0), eventually((one.place / "steps.jsonl").exists, "a step")
    one.signal(number)
    ended = one.ended()
    assert ended.code == code, ended
    assert "asked to stop: saving" in ended.stdout
    assert ended.stderr == "stopped, and saved; the same command goes on from there\n"


def test_a_run_that_is_asked_to_stop_before_its_first_step_claims_no_checkpoint(run: MakeRun) -> None:
    one = run()
    one.start([[SAVES]])
    one.life(0, 0)
    one.signal(signal.SIGTERM)
    ended = one.ended()
    assert ended.code == 143, ended
    assert "nothing to save" in ended.stderr


def test_a_run_that_is_asked_to_stop_in_a_later_start_claims_no_checkpoint_either(run: MakeRun) -> None:
    one = run()
    one.start([[STEPS, ["ends", 1, "a rank failed"]], [["stops_when_asked"]]])
    one.life(0, 1)
    one.signal(signal.SIGTERM)
    ended = one.ended()
    assert ended.code == 143, ended
    assert ended.stderr.endswith("stopped, and nothing is saved; the same command starts again with the first step\n")


def test_a_second_request_ends_a_run_that_saves_for_ever(run: MakeRun) -> None:
    one = run()
    one.start([[["saves_for_ever"]]])
    pid = int(one.life(0, 0)["pid"])
    one.signal(signal.SIGINT)
    assert one.process is not None
    assert one.process.stdout is not None
    while "saving" not in one.process.stdout.readline():
        pass
    one.signal(signal.SIGINT)
    ended = one.ended()
    assert ended.code == 130, ended
    assert "ended before everything was saved" in ended.stderr
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "the end of the launcher")


def test_a_run_that_cannot_save_says_so_and_fails(run: MakeRun) -> None:
    one = run()
    one.start([[["fails_when_asked"]]])
    one.life(0, 0)
    one.signal(signal.SIGTERM)
    ended = one.ended()
    assert ended.code == 1, ended
    assert "the disk is full" in ended.stderr


def test_a_launcher_that_somebody_else_stopped_was_taken_away_and_costs_nothing(run: MakeRun) -> None:
    one = run(lifecycle={"backoffLimit": 0}, **TWO_NODES)
    one.start([[SAVES], [DONE]], [[SAVES], [DONE]])
    # All ranks save together; the first launcher to end does not take the other's save away.
    for pod in (1, 0):
        os.kill(int(one.life(pod, 0)["pid"]), signal.SIGTERM)
    ended = one.ended()
    assert ended.code == 0, ended
    assert "Preempted in pod" in ended.stdout
    assert (one.lives(0), one.lives(1)) == (2, 2)


@pytest.mark.parametrize(
    ("acts", "words"), [([STEPS, SAVES], "saved"), ([SAVES], "nothing is saved")], ids=["with steps", "without"]
)
def test_a_run_past_its_deadline_saves_and_fails(run: MakeRun, acts: list[Act], words: str) -> None:
    ended = run(lifecycle={"activeDeadlineSeconds": 1}).run([acts])
    assert ended.code == 1, ended
    assert f"activeDeadlineSeconds 1; {words}" in ended.stderr


def test_launchers_save_when_whoever_looks_after_them_is_killed(run: MakeRun) -> None:
    one = run()
    one.start([[SAVES]])
    one.life(0, 0)
    one.signal(signal.SIGKILL)
    word = one.place / "logs" / "pod-0.json"
    eventually(lambda: word.exists() and "Preempted" in word.read_text(), "the last word")


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_two_runs_in_one_folder_are_refused(run: MakeRun) -> None:
    first, second = run(), run()
    first.start([[SAVES]])
    first.life(0, 0)
    ended = second.run([[DONE]])
    assert ended.code == 78
    assert "is in use by another moejob run" in ended.stderr
    assert first.lives(0) == 1


def test_a_folder_stays_taken_while_launchers_save_that_nobody_looks_after(run: MakeRun) -> None:
    first, second = run(), run()
    first.start([[["saves_for_ever"]]])
    pid = int(first.life(0, 0)["pid"])
    first.signal(signal.SIGKILL)
    first.ended()
    assert second.run([[DONE]]).code == 78
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "the end of the launcher")
    assert second.run([[DONE]], [[DONE]]).code == 0


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        pytest.param(
            {"MOEJOB_TRAINER_PYTHON": "/nowhere/python"}, "/nowhere/python, which is no program", id="no file"
        ),
        pytest.param({"PYTHONPATH": ""}, f"{sys.executable} has no moejob_trainer", id="no trainer in it"),
    ],
)
def test_a_missing_trainer_is_said_with_what_helps(run: MakeRun, environment: dict[str, str], said: str) -> None:
    ended = run().run([[DONE]], **environment)
    assert ended.code == 78
    assert said in ended.stderr
    assert "set MOEJOB_TRAINER_PYTHON" in ended.stderr


def test_a_gpu_job_without_gpus_is_refused_with_what_helps(run: MakeRun) -> None:
    ended = run(resources={"accelerator": "GPU"}).run([[DONE]], CUDA_VISIBLE_DEVICES="")
    assert ended.code == 78
    assert "the job needs 1 GPU" in ended.stderr
    assert "spec.resources.accelerator: CPU" in ended.stderr


def test_a_secret_that_this_shell_lacks_is_named(run: MakeRun) -> None:
    secret = {"name": "SOME_TOKEN", "secret": {"name": "tokens", "key": "hub"}}
    one = run(resources={"env": [secret]})
    ended = one.run([[DONE]])
    assert ended.code == 78
    assert "SOME_TOKEN" in ended.stderr
    assert one.run([[DONE]], SOME_TOKEN="here").code == 0
    assert one.life(0, 0)["SOME_TOKEN"] == "here"


def test_a_folder_with_other_things_is_left_alone(run: MakeRun) -> None:
    one = run()
    one.place.mkdir()
    (one.place / "thesis.tex").write_text("")
    ended = one.run([[DONE]])
    assert ended.code == 78
    assert "name an empty or new folder" in ended.stderr
    assert [path.name for path in one.place.iterdir()] == ["thesis.tex"]


def test_the_folder_of_another_job_is_refused(run: MakeRun) -> None:
    one = run()
    one.place.mkdir()
    (one.place / "run.json").write_text('{"job": "other", "uid": "1"}')
    ended = one.run([[DONE]])
    assert ended.code == 78
    assert "the run folder of job other" in ended.stderr


def test_a_job_that_the_plan_refuses_does_not_start(run: MakeRun) -> None:
    one = run(parallelism={"tensor": 3})
    ended = one.run([[DONE]])
    assert ended.code == 1
    assert "refused" in ended.stdout
    assert not one.place.exists()

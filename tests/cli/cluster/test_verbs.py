"""Verbs that read a job, as processes before a stand-in of an API server: their lines, JSON and exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import aiohttp
import pytest
from typer.testing import CliRunner

from moejob_api.contract.stacks import STACKS_MODULE
from moejob_cli.app import app
from moejob_cli.cluster.logs import parse_age
from pod_log_server import NAMESPACE, PodLogServer, ServedPod, serve_pod_logs

Result = tuple[int, str, str]
RunVerb = Callable[..., Awaitable[Result]]
Story = Callable[[PodLogServer, RunVerb], Awaitable[None]]
ESCAPE = "\x1b[2J"
# Each takes longer to import than all else that a verb does before its first request.
HEAVY = ("kubernetes", "pydantic", "rich", "moejob_api.job.job", "moejob_api.diagnosis.diagnose")


SCREEN = f"""\
{NAMESPACE}/job  Running  2/10, 4m left
loss     2          █▁
speed    3,000      ▁█ tokens/s/GPU
GPU      41.2 % of peak, 408 TFLOP/s
memory   61.5 GiB at most, on the fullest rank
step     2 s, mean of 2; data 25 %
"""


def run_story(folder: Path, story: Story) -> None:
    async def served() -> None:
        async with serve_pod_logs() as (server, client), asyncio.timeout(120):
            server.run_folder = folder
            kubeconfig = folder / "kubeconfig"
            cluster = {"name": "c", "cluster": {"server": client.host}}
            context = {"name": "c", "context": {"cluster": "c", "namespace": NAMESPACE}}
            kubeconfig.write_text(json.dumps({"current-context": "c", "contexts": [context], "clusters": [cluster]}))

            async def run_verb(*arguments: str) -> Result:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "moejob_cli", *arguments),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=os.environ | {"KUBECONFIG": str(kubeconfig)},
                )
                output, errors = await process.communicate()
                return process.returncode or 0, output.decode(), errors.decode()

            await story(server, run_verb)

    asyncio.run(served())


@pytest.fixture(autouse=True)
def _outside_of_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


def test_logs_have_rank_and_node_in_front_and_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    async def story(server: PodLogServer, run_verb: RunVerb) -> None:
        pod = await server.add_pod(ServedPod("job-0", "uid-0"))
        await server.write(pod, "launcher starts")
        await server.write(pod, f"[rank 1] {ESCAPE}loss")
        assert await run_verb("logs", "job") == (
            0,
            "[job-0 node-1] launcher starts\n[rank 1 node-1] \\x1b[2Jloss\n",
            "",
        )
        code, output, _ = await run_verb("logs", "job", "--rank", "1", "-o", "json")
        [line] = [json.loads(text) for text in output.splitlines()]
        assert (code, line["rank"], line["pod"], line["text"]) == (0, 1, "job-0", f"{ESCAPE}loss")

    run_story(tmp_path, story)


def test_steps_and_answers_are_printed_as_tables_and_as_json(tmp_path: Path) -> None:
    async def story(server: PodLogServer, run_verb: RunVerb) -> None:
        await server.add_pod(ServedPod("job-0", "uid-0"))
        (tmp_path / "steps.jsonl").write_text('{"step": 1, "loss": 2.123456789, "other": 7}\n{"step": 2, "loss": 1}\n')
        (tmp_path / "samples").mkdir()
        sample = {"prompt": "2+2?", "answer": f"4{ESCAPE}\nyes", "reward": 1.0}
        (tmp_path / "samples" / "step-3.jsonl").write_text(json.dumps(sample) + "\n")
        code, output, _ = await run_verb("steps", "job")
        assert (code, [line.split() for line in output.splitlines()]) == (
            0,
            [["step", "loss"], ["1", "2.12346"], ["2", "1"]],
        )
        _, output, _ = await run_verb("steps", "job", "-o", "json")
        assert [json.loads(line)["step"] for line in output.splitlines()] == [1, 2]
        _, output, _ = await run_verb("samples", "job")
        assert output == "--- step 3  reward 1\nprompt: 2+2?\nanswer: 4\\x1b[2J\nyes\n"
        _, output, _ = await run_verb("samples", "job", "--step", "3", "-o", "json")
        assert json.loads(output) == {"step": 3, **sample}
        code, _, errors = await run_verb("samples", "job", "--step", "9")
        assert (code, errors) == (3, "error: there are no answers of step 9; there are those of 3\n")

    run_story(tmp_path, story)


def test_steps_and_answers_of_a_run_of_this_machine_need_no_cluster(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step-3.jsonl").write_text('{"prompt": "2+2?", "answer": "4", "reward": 1.0}\n')

    def run_here(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, [*arguments])
        return result.exit_code, result.output

    steps = run_here("steps", str(tmp_path))
    assert (steps[0], steps[1].split()) == (0, ["step", "loss", "1", "2.5"])
    assert run_here("steps", str(tmp_path), "-o", "json") == (0, '{"step": 1, "loss": 2.5}\n')
    assert run_here("samples", str(tmp_path)) == (0, "--- step 3  reward 1\nprompt: 2+2?\nanswer: 4\n")
    code, output = run_here("samples", str(tmp_path), "--eval")
    fix = "grpo.loggedAnswers writes those of steps, evaluations with prompts theirs, which --eval prints"
    assert (code, output) == (3, f"error: there are no answers of any step; {fix}\n")
    (tmp_path / "steps.jsonl").unlink()
    assert run_here("steps", str(tmp_path))[0] == 3


def test_files_are_copied_and_counted(tmp_path: Path) -> None:
    async def story(server: PodLogServer, run_verb: RunVerb) -> None:
        await server.add_pod(ServedPod("job-0", "uid-0"))
        (tmp_path / "export").mkdir()
        (tmp_path / "export" / "config.json").write_text("{}")
        target = tmp_path / "copy"
        assert await run_verb("cp", "job", "export", str(target)) == (0, f"{target}: 1 files\n", "")
        assert (target / "config.json").read_text() == "{}"
        code, _, errors = await run_verb("cp", "job", "export", str(target))
        assert (code, "exists already; name a new folder" in errors) == (1, True)

    run_story(tmp_path, story)


def test_top_shows_a_screen_once_where_there_is_no_terminal_and_all_numbers_as_json(tmp_path: Path) -> None:
    async def story(server: PodLogServer, run_verb: RunVerb) -> None:
        pod = await server.add_pod(ServedPod("job-0", "uid-0"))
        server.status["display"] = {"step": "2/10", "eta": "4m", "speed": "99"}
        steps = [
            {
                "step": 1,
                "loss": 3.0,
                "seconds": 2.0,
                "tokensPerSecondPerGpu": 1000.0,
                "mfu": 0.3,
                "dataWaitSeconds": 1.0,
            },
            {
                "step": 2,
                "loss": 2.0,
                "seconds": 2.0,
                "tokensPerSecondPerGpu": 3000.0,
                "mfu": 0.412,
                "tflopsPerGpu": 407.6,
            },
        ]
        steps[1]["peakMemoryBytes"] = 61.5 * 2**30
        (tmp_path / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        assert await run_verb("top", "job") == (
            0,
            SCREEN,
            "",
        )
        code, output, _ = await run_verb("top", "job", "-o", "json")
        document = json.loads(output)
        assert (code, document["step"], document["lastStep"]) == (0, "2/10", steps[1])
        await server.change_pod(pod, "terminated")
        await server.end_job("Failed")
        code, output, _ = await run_verb("top", "job")
        assert (code, output.splitlines()[-1]) == (1, "no pod of it runs, so the step log is not read")
        assert (server.readers, "speed    99" in output) == ([], True)

    run_story(tmp_path, story)


def test_a_broken_step_log_breaks_no_screen(tmp_path: Path) -> None:
    async def story(server: PodLogServer, run_verb: RunVerb) -> None:
        await server.add_pod(ServedPod("job-0", "uid-0"))
        lines = [
            '{"loss": "x", "seconds": null, "mfu": true}',
            '{"loss": 1e999, "seconds": 0}',
            f'{{"{ESCAPE}": 1}}',
            "{",
        ]
        (tmp_path / "steps.jsonl").write_text("\n".join(lines) + "\n")
        code, output, errors = await run_verb("top", "job")
        assert (code, errors, ESCAPE in output) == (0, "", False)

    run_story(tmp_path, story)


def test_the_export_of_a_job_is_fetched_where_no_folder_has_its_name(tmp_path: Path) -> None:
    async def story(server: PodLogServer, run_verb: RunVerb) -> None:
        await server.add_pod(ServedPod("job-0", "uid-0"))
        target = tmp_path / "model"
        code, _, errors = await run_verb("export", "job", "--out", str(target))
        assert (code, errors.startswith("error: job is Running and has no export; ")) == (3, True)
        (tmp_path / "export").mkdir()
        (tmp_path / "export" / "config.json").write_text("{}")
        assert await run_verb("export", "@latest", "--out", str(target)) == (0, f"{target}: 1 files\n", "")
        code, _, errors = await run_verb("export", "job", "--out", str(target), "--step", "3")
        assert (code, "has a meaning only for a run folder" in " ".join(errors.split())) == (2, True)

    run_story(tmp_path, story)


def test_the_page_of_a_job_is_served_from_a_copy_until_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text('{"step": 1, "loss": 2.5}\n')

    async def story(server: PodLogServer, _run_verb: RunVerb) -> None:
        await server.add_pod(ServedPod("job-0", "uid-0"))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "moejob_cli", "open", "job", "--port", "0"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"KUBECONFIG": str(tmp_path / "kubeconfig"), "TMPDIR": str(tmp_path)},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        async with aiohttp.ClientSession() as session, session.get(f"{url}api/runs") as answer:
            [run] = await answer.json()
        assert (run["name"], run["step"]) == ("job", 1)
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
        assert (process.returncode, errors) == (130, b"")

    run_story(tmp_path, story)
    assert list(tmp_path.glob("moejob-open-*")) == []


def test_jobs_are_compared_with_runs_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    here = tmp_path / "here"
    here.mkdir()
    (here / "run.json").write_text('{"job": "older", "uid": "1"}')
    (here / "steps.jsonl").write_text('{"step": 1, "loss": 2.75}\n')

    async def story(server: PodLogServer, run_verb: RunVerb) -> None:
        await server.add_pod(ServedPod("job-0", "uid-0"))
        code, output, _ = await run_verb("compare", "@latest", str(here), "-o", "json")
        answer = json.loads(output)
        assert (code, answer["runs"], answer["curves"]["loss"]["values"]) == (0, ["job", "older"], [2.5, 2.75])
        code, _, errors = await run_verb("compare", "job")
        assert (code, "name two runs or more" in " ".join(errors.split())) == (2, True)

    run_story(tmp_path, story)


def test_a_run_folder_without_files_has_no_page(tmp_path: Path) -> None:
    async def story(server: PodLogServer, run_verb: RunVerb) -> None:
        await server.add_pod(ServedPod("job-0", "uid-0"))
        code, _, errors = await run_verb("open", "job", "--port", "0")
        assert (code, errors) == (3, "error: the run folder of job is empty: no rank has started yet\n")

    run_story(tmp_path, story)


def test_stacks_are_printed_by_rank_and_a_pod_without_them_is_exit_1(tmp_path: Path) -> None:
    async def story(server: PodLogServer, run_verb: RunVerb) -> None:
        pod = await server.add_pod(ServedPod("job-0", "uid-0"))
        code, output, errors = await run_verb("stacks", "job")
        assert (code, output, errors) == (
            1,
            "[job-0 node-1] its ranks cannot be asked: its image is older than this moejob\n",
            "",
        )
        line = {"rank": 3, "pid": 7, "lines": [f"in {ESCAPE}step"], "problem": ""}
        server.modules[STACKS_MODULE] = f"print({json.dumps(line)!r})"
        assert await run_verb("stacks", "@latest") == (0, "[rank 3 node-1]\nin  [2Jstep\n\n", "")
        code, output, _ = await run_verb("stacks", "job", "-o", "json")
        assert (code, json.loads(output)) == (
            0,
            {"pod": "job-0", "node": "node-1", **line, "lines": ["in  [2Jstep"]},
        )
        await server.change_pod(pod, "terminated")
        code, _, errors = await run_verb("stacks", "job")
        assert (code, errors.startswith("error: no pod of job runs")) == (3, True)

    run_story(tmp_path, story)


@pytest.mark.parametrize(
    ("text", "age"),
    [
        ("90s", timedelta(seconds=90)),
        ("10m", timedelta(minutes=10)),
        ("1d", timedelta(days=1)),
        ("1", None),
        ("-1s", None),
    ],
)
def test_an_age_is_read(text: str, age: timedelta | None) -> None:
    assert parse_age(text) == age


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--since", "yesterday"], "is no age; write 90s, 10m, 2h or 1d"),
        (["--previous", "-f"], "has a meaning only without --follow and --attempt"),
    ],
)
def test_options_that_cannot_work_are_refused(arguments: list[str], words: str) -> None:
    command = [sys.executable, "-m", "moejob_cli", "logs", "job", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, words in " ".join(result.stderr.split())) == (2, True)


def test_a_verb_waits_for_no_import_that_it_does_not_need() -> None:
    modules = "moejob_cli.app, moejob_cli.cluster.jobs, moejob_cli.cluster.logs, moejob_cli.cluster.files, "
    modules += "moejob_cli.cluster.top, moejob_cli.cluster.stacks"
    program = f"import sys, {modules}; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[]\n"

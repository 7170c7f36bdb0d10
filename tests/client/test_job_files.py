"""Steps, answers, logs and files of a run folder, read by a living pod or by one that is made for it and deleted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from moejob_api.contract.record import RecordEvent, RunEventKind, attempt_folder_name, pod_record_name, record_line
from moejob_client.failures import JobRequestError
from moejob_client.job_volume import READER_LABEL
from moejob_client.jobs import AsyncClient
from moejob_client.log_selection import LogSelection
from moejob_client.run_mirror import RunMirror
from pod_log_server import PodLogServer, ServedPod, serve_pod_logs

Story = Callable[[PodLogServer, AsyncClient], Awaitable[None]]


def run_story(folder: Path, story: Story) -> None:
    async def served() -> None:
        async with serve_pod_logs() as (server, client):
            server.run_folder = folder
            async with asyncio.timeout(60):
                await story(server, client)

    asyncio.run(served())


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run with two steps of which one is damaged, answers of two steps and of an evaluation, and an export."""
    folder = tmp_path / "run"
    (folder / "samples").mkdir(parents=True)
    (folder / "export" / "deep").mkdir(parents=True)
    (folder / "steps.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": \n{"step": 2, "loss": 2.25}\n{"step": 3')
    for step in (2, 10):
        (folder / "samples" / f"step-{step}.jsonl").write_text(json.dumps({"answer": f"of {step}"}) + "\n")
    (folder / "samples" / "eval-step-7.jsonl").write_text('{"answer": "evaluated"}\n')
    (folder / "export" / "config.json").write_text("{}")
    (folder / "export" / "deep" / "weights").write_bytes(bytes(range(256)) * 4096)
    (folder / "export" / "link").symlink_to("/etc/passwd")
    return folder


async def read_steps(client: AsyncClient) -> list[int]:
    return [step["step"] async for step in client.steps("job")]


def test_steps_are_read_through_a_living_pod(run_folder: Path) -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        await server.add_pod(ServedPod("job-0", "uid-0"))
        assert await read_steps(client) == [1, 2]
        assert server.readers == []

    run_story(run_folder, story)


def test_without_a_living_pod_a_reader_is_made_and_deleted(run_folder: Path) -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        await server.add_pod(ServedPod("job-0", "uid-0", state="terminated"))
        assert await read_steps(client) == [1, 2]
        [reader] = server.readers
        assert reader["metadata"]["labels"] == {READER_LABEL: "job"}
        [container] = reader["spec"]["containers"]
        assert (container["image"], container["volumeMounts"][0]["readOnly"]) == ("of-the-pod", True)
        assert reader["spec"]["volumes"][0]["persistentVolumeClaim"] == {"claimName": "job-storage"}
        assert list(server.pods) == ["job-0"]

    run_story(run_folder, story)


def test_a_reader_is_deleted_when_its_command_fails(run_folder: Path) -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        await server.add_pod(ServedPod("job-0", "uid-0", state="terminated"))
        with pytest.raises(JobRequestError, match="there are no answers of step 5; there are those of 2, 10"):
            _ = [sample async for sample in client.samples("job", 5)]
        assert list(server.pods) == ["job-0"]

    run_story(run_folder, story)


def test_without_an_image_no_reader_is_made(run_folder: Path) -> None:
    async def story(_: PodLogServer, client: AsyncClient) -> None:
        with pytest.raises(JobRequestError, match="no image to read its volume with is known; mount its claim"):
            await read_steps(client)

    run_story(run_folder, story)


def test_a_connection_that_breaks_is_no_end_of_a_file(run_folder: Path) -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        server.most_output = 30
        await server.add_pod(ServedPod("job-0", "uid-0"))
        with pytest.raises(JobRequestError, match="broke before its program had ended"):
            await read_steps(client)

    run_story(run_folder, story)


@pytest.mark.parametrize("state", ["running", "terminated"])
def test_missing_rights_are_one_sentence(run_folder: Path, state: str) -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        server.is_denied = True
        await server.add_pod(ServedPod("job-0", "uid-0", state=state))
        with pytest.raises(JobRequestError, match=r"no rights: .* ask for the role"):
            await read_steps(client)

    run_story(run_folder, story)


@pytest.mark.parametrize(
    ("step", "is_evaluation", "expected"),
    [(None, False, (10, "of 10")), (2, False, (2, "of 2")), (None, True, (7, "evaluated"))],
)
def test_answers_are_those_of_a_step_or_of_the_newest(
    run_folder: Path, step: int | None, is_evaluation: bool, expected: tuple[int, str]
) -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        await server.add_pod(ServedPod("job-0", "uid-0"))
        samples = [sample async for sample in client.samples("job", step, is_evaluation=is_evaluation)]
        assert [(sample["step"], sample["answer"]) for sample in samples] == [expected]

    run_story(run_folder, story)


def test_a_folder_is_copied_to_the_byte_and_no_link_with_it(run_folder: Path, tmp_path: Path) -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        await server.add_pod(ServedPod("job-0", "uid-0"))
        target = tmp_path / "copy"
        assert await client.copy("job", "export", target) == 2
        copied = {str(path.relative_to(target)): path for path in target.rglob("*") if not path.is_dir()}
        assert sorted(copied) == ["config.json", "deep/weights"]
        assert copied["deep/weights"].read_bytes() == (run_folder / "export/deep/weights").read_bytes()

    run_story(run_folder, story)


def test_one_file_is_copied_into_its_folder(run_folder: Path, tmp_path: Path) -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        await server.add_pod(ServedPod("job-0", "uid-0"))
        assert await client.copy("job", "export/deep/weights", tmp_path / "copy") == 1
        assert [path.name for path in (tmp_path / "copy").iterdir()] == ["weights"]

    run_story(run_folder, story)


@pytest.mark.parametrize(
    ("path", "target", "message"),
    [
        ("export", ".", "exists already; name a new folder"),
        ("nothing", "new", "there is no nothing in the run folder"),
        ("../other", "new", "is no path inside the run folder"),
        ("/etc", "new", "is no path inside the run folder"),
    ],
)
def test_a_copy_that_cannot_be_made_is_refused(
    run_folder: Path, tmp_path: Path, path: str, target: str, message: str
) -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        await server.add_pod(ServedPod("job-0", "uid-0"))
        with pytest.raises(JobRequestError, match=message):
            await client.copy("job", path, tmp_path / target)

    run_story(run_folder, story)


def test_the_last_steps_are_read_by_a_running_pod_alone(run_folder: Path) -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        pod = await server.add_pod(ServedPod("job-0", "uid-0"))
        assert [step["step"] for step in await client.last_steps("job", 5) or ()] == [1, 2]
        (run_folder / "steps.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(5000)))
        assert [step["step"] for step in await client.last_steps("job", 3) or ()] == [4997, 4998, 4999]
        await server.change_pod(pod, "terminated")
        assert await client.last_steps("job", 3) is None
        assert server.readers == []

    run_story(run_folder, story)


def test_an_export_is_fetched_and_its_absence_explained(run_folder: Path, tmp_path: Path) -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        await server.add_pod(ServedPod("job-0", "uid-0"))
        assert await client.export("job", tmp_path / "model") == 2
        assert (tmp_path / "model" / "config.json").read_text() == "{}"
        words = "job is Running and has no export; .* if checkpoint.exportMegatron is true; `moejob cp job checkpoints"
        with pytest.raises(JobRequestError, match=words):
            await client.export("job", tmp_path / "other", to_megatron=True)
        assert not (tmp_path / "other").exists()

    run_story(run_folder, story)


def test_a_mirror_has_the_small_files_of_a_run_and_grows_with_them(run_folder: Path, tmp_path: Path) -> None:
    write_record(run_folder, 1, "first")
    (run_folder / "spec.json").write_text('{"method": "SFT"}')
    mirror = RunMirror(tmp_path / "mirror")
    mirror.folder.mkdir()

    async def story(server: PodLogServer, client: AsyncClient) -> None:
        pod = await server.add_pod(ServedPod("job-0", "uid-0"))
        assert await client.refresh_mirror("job", mirror, may_start_pod=False)
        names = {str(path.relative_to(mirror.folder)) for path in mirror.folder.rglob("*") if path.is_file()}
        assert names == {
            *("spec.json", "steps.jsonl", "experts.jsonl"),
            f"record/{attempt_folder_name(1)}/{pod_record_name(0)}",
            *("samples/step-2.jsonl", "samples/step-10.jsonl", "samples/eval-step-7.jsonl"),
        }
        # A half line that a start cuts, as after a loss of power, and lines in its place.
        steps = (run_folder / "steps.jsonl").read_text().rpartition("\n")[0] + '\n{"step": 4}\n'
        (run_folder / "steps.jsonl").write_text(steps)
        write_record(run_folder, 2, "second")
        (run_folder / "samples" / "step-11.jsonl").write_text('{"answer": "new"}\n')
        assert await client.refresh_mirror("job", mirror, may_start_pod=False)
        for name in ("steps.jsonl", "samples/step-11.jsonl", f"record/{attempt_folder_name(2)}/{pod_record_name(0)}"):
            assert (mirror.folder / name).read_bytes() == (run_folder / name).read_bytes()
        await server.change_pod(pod, "terminated")
        assert not await client.refresh_mirror("job", mirror, may_start_pod=False)
        assert server.readers == []
        assert await client.refresh_mirror("job", mirror, may_start_pod=True)
        assert len(server.readers) == 1

    run_story(run_folder, story)


def write_record(folder: Path, attempt: int, word: str) -> None:
    events = [
        RecordEvent(time=1_800_000_000, kind=RunEventKind.LAUNCHER_STARTED, pod=0, node="node-1", ranks=(0, 1)),
        RecordEvent(time=1_800_000_001, kind=RunEventKind.RANKS_FAILED, pod=0, message="rank 1 ended", rank=1),
        RecordEvent(time=1_800_000_002, kind=RunEventKind.LAST_LINES, pod=0, rank=1, lines=("Traceback", word)),
    ]
    path = folder / "record" / attempt_folder_name(attempt) / pod_record_name(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(map(record_line, events)))


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (LogSelection(), ["RanksFailed: rank 1 ended", "Traceback", "new"]),
        (LogSelection(rank=1), ["Traceback", "new"]),
        (LogSelection(attempt=1), ["RanksFailed: rank 1 ended", "Traceback", "old"]),
        (LogSelection(is_previous=True), ["RanksFailed: rank 1 ended", "Traceback", "old"]),
    ],
    ids=["newest", "rank", "attempt", "previous"],
)
def test_logs_of_pods_that_are_gone_are_those_of_the_record(
    run_folder: Path, selection: LogSelection, expected: list[str]
) -> None:
    write_record(run_folder, 1, "old")
    write_record(run_folder, 2, "new")

    async def story(server: PodLogServer, client: AsyncClient) -> None:
        server.status |= {"startTime": "2026-01-01T00:00:00Z", "attempt": 2}
        server.image = "of-the-job"
        lines = [line async for line in client.logs("job", selection)]
        assert [line.text for line in lines] == expected
        assert {line.node for line in lines} == {"node-1"}
        assert server.readers[0]["spec"]["containers"][0]["image"] == "of-the-job"
        assert server.pods == {}

    run_story(run_folder, story)

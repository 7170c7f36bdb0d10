"""The command line as a person meets it: real processes, real files, exit codes, one clear message, no traceback."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.models import CommandInfo

from moejob_api.contract.names import RunFile
from moejob_cli.app import app
from moejob_cli.cluster.commands import verbs
from moejob_cli.model_commands import model_commands

EXAMPLES = Path(__file__).parents[2] / "examples"
ACCEPTED = EXAMPLES / "mixtral-8x7b-sft-16gpu.yaml"
REFUSED = EXAMPLES / "wrong" / "deepseek-v3-sft-64gpu.yaml"


def moejob(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a process of its own, with no terminal in sight."""
    command = [sys.executable, "-m", "moejob_cli", *arguments]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, check=False, timeout=300, env=os.environ | environment
    )


def ended(last: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command and, as it ends, a statement."""
    command = f"""import gc, sys
from moejob_cli.__main__ import main
sys.argv = ["moejob", *{arguments}]
before = gc.get_stats()
try: main()
finally: {last}"""
    return subprocess.run(
        [sys.executable, "-c", command],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_an_accepted_job_exits_0_and_says_what_it_takes() -> None:
    answer = moejob("plan", str(ACCEPTED))
    assert answer.returncode == 0
    assert answer.stderr == ""
    for said in ("accepted", "16 GPUs on 2 nodes", "46.7 B parameters", "gradients", "activations between layers"):
        assert said in answer.stdout


@pytest.mark.parametrize(
    ("example", "said"),
    [
        pytest.param("tiny-grpo", "1 engine on 1 further node", id="on CPUs"),
        pytest.param("qwen2.5-0.5b-grpo-1gpu", "1 engine of 1 GPU on the trainer's GPUs", id="colocated"),
        pytest.param("llama-405b-grpo-256gpu", "4 engines of 8 GPUs on 32 further GPUs on 4 nodes", id="separate"),
    ],
)
def test_a_plan_counts_engines_and_what_they_run_on(example: str, said: str) -> None:
    assert f"  rollout  {said}\n" in moejob("plan", str(EXAMPLES / f"{example}.yaml")).stdout


def test_a_plan_counts_the_nodes_and_gpus_of_spares() -> None:
    said = moejob("plan", str(ACCEPTED), "--set", "resources.spares=1").stdout
    assert "16 GPUs on 2 nodes" in said
    assert "  spares   1 further pod with 8 GPUs, together 24 GPUs on 3 nodes\n" in said
    document = json.loads(moejob("plan", str(ACCEPTED), "--set", "resources.spares=1", "--output", "json").stdout)
    assert [document["layout"][name] for name in ("gpus", "nodes", "spares")] == [16, 2, 1]


PROFILE = """
apiVersion: moejob.dev/v1beta1
kind: ClusterMoETrainingProfile
metadata: {name: h100}
spec:
  resources: {image: "registry.example.com/trainer:1", nodeSelector: {pool: h100}, gpusPerNode: 4}
  lifecycle: {queue: research}
"""


def test_a_plan_with_a_profile_shows_what_the_job_has_from_it_and_plans_the_merged_job(tmp_path: Path) -> None:
    profile = tmp_path / "h100.yaml"
    profile.write_text(PROFILE)
    names_it = ("plan", str(ACCEPTED), "--set", "profile=h100")
    assert "  without profile h100: give its file with --profile\n" in moejob(*names_it).stdout
    answer = moejob(*names_it, "--profile", str(profile), "--set", "resources.image=own:1")
    assert "  from ClusterMoETrainingProfile h100:\n" in answer.stdout
    assert '    resources.nodeSelector: {"pool": "h100"}\n' in answer.stdout
    assert '    lifecycle.queue: "research"\n' in answer.stdout
    assert "resources.image" not in answer.stdout
    assert "16 GPUs on 4 nodes, 4 in each pod" in answer.stdout
    document = json.loads(moejob(*names_it, "--profile", str(profile), "-o", "json").stdout)
    assert document["profile"]["values"]["lifecycle"] == {"queue": "research"}
    [pod] = yaml.safe_load_all(moejob(*names_it, "--profile", str(profile), "--pods").stdout)
    assert pod["spec"]["nodeSelector"] == {"pool": "h100"}
    assert pod["spec"]["containers"][0]["image"] == "registry.example.com/trainer:1"


def test_a_profile_that_the_job_does_not_name_is_refused(tmp_path: Path) -> None:
    profile = tmp_path / "h100.yaml"
    profile.write_text(PROFILE)
    answer = moejob("plan", str(ACCEPTED), "--set", "profile=b200", "--profile", str(profile))
    assert answer.returncode != 0
    assert "the job names the profile b200, and the file holds h100" in answer.stderr


def test_a_plan_says_what_pods_request_and_which_driver_nodes_need() -> None:
    file = str(EXAMPLES / "qwen3-30b-grpo-async-8gpu.yaml")
    removals = ("--set", "resources.memory=", "--set", "resources.cpu=")
    text = " ".join(moejob("plan", file, *removals).stdout.split())
    # Four GPUs for the trainer and for each engine pod.
    assert "each pod requests cpu 32, memory 440272Mi; limits none; /dev/shm 16Gi" in text
    assert "each engine pod requests cpu 8, memory 12Gi; limits none; /dev/shm 4Gi" in text
    assert "nodes need the NVIDIA driver 580 or later, for CUDA 13 of the images" in text
    pods = json.loads(moejob("plan", file, *removals, "--output", "json").stdout)["pods"]
    assert pods["rollout"] == {"requests": {"cpu": "8", "memory": "12Gi"}, "limits": {}, "sharedMemory": "4Gi"}
    assert pods["trainer"]["requests"]["cpu"] == "32"


def test_a_plan_on_cpus_names_no_driver() -> None:
    said = moejob("plan", str(EXAMPLES / "tiny-sft.yaml")).stdout
    assert "each pod requests cpu 2, memory 6Gi; limits memory 6Gi; /dev/shm 1Gi" in " ".join(said.split())
    assert "driver" not in said


def test_a_refused_job_exits_1_and_says_why_and_what_would_be_accepted() -> None:
    answer = moejob("plan", str(REFUSED))
    assert answer.returncode == 1
    assert "must divide tensor 1 x context 1 x data 4 = 4" in answer.stdout
    assert "layouts that would be accepted" in answer.stdout
    assert "expert: 4" in answer.stdout


def test_nothing_is_coloured_or_padded_when_nobody_is_looking() -> None:
    out = moejob("plan", str(ACCEPTED), "--ranks").stdout
    assert "\x1b" not in out
    assert not [line for line in out.splitlines() if line != line.rstrip()]


def test_a_job_can_come_from_standard_input() -> None:
    assert moejob("plan", "-", stdin=ACCEPTED.read_text()).returncode == 0


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_the_document_has_the_keys_that_others_build_on(output: str) -> None:
    said = moejob("plan", str(ACCEPTED), "--output", output).stdout
    answer = json.loads(said) if output == "json" else yaml.safe_load(said)
    assert answer["accepted"] is True
    assert answer["model"]["family"] == "mixtral"
    assert answer["model"]["parameters"] == 46_702_792_704
    assert answer["model"]["activeParameters"] < 13e9
    expected = {
        "gpus": 16,
        "nodes": 2,
        "gpusPerPod": 8,
        "tensor": 2,
        "pipeline": 2,
        "expert": 4,
        "expertTensor": 2,
        "context": 1,
        "data": 4,
        "expertData": 1,
        "virtualPipeline": 1,
    }
    assert {name: answer["layout"][name] for name in expected} == expected
    memory = answer["memory"]
    assert memory["perGpuBytes"] == sum(part["bytes"] for part in memory["parts"]) <= memory["limitBytes"]
    volume = answer["volume"]
    written = volume["checkpoints"] * volume["checkpoint"] + volume["export"] + volume["download"]
    assert 0 < written == volume["bytes"]
    assert answer["problems"] == answer["suggestions"] == []


def test_the_document_of_a_refused_job_has_problems_and_suggestions() -> None:
    answer = json.loads(moejob("plan", str(REFUSED), "-o", "json").stdout)
    assert answer["accepted"] is False
    assert answer["problems"][0]["rule"] == "ExpertGrid"
    assert answer["problems"][0]["path"] == "spec.parallelism.expert"
    assert {"parallelism", "gpus", "nodes", "perGpuBytes"} <= answer["suggestions"][0].keys()


def test_the_document_of_grpo_tells_where_answers_are_generated() -> None:
    answer = json.loads(moejob("plan", str(EXAMPLES / "llama-70b-grpo-128gpu.yaml"), "-o", "json").stdout)
    assert {name: answer["rollout"][name] for name in ("gpus", "nodes", "engines")} == {
        "gpus": 16,
        "nodes": 2,
        "engines": 4,
    }


def test_a_plan_of_grpo_says_who_waits_for_whom() -> None:
    job = str(EXAMPLES / "llama-405b-grpo-256gpu.yaml")
    shown, answer = moejob("plan", job).stdout, json.loads(moejob("plan", job, "-o", "json").stdout)["rolloutTime"]
    (step,) = [step for step in answer["steps"] if step["staleness"] == answer["staleness"]]
    parts = step["syncSeconds"] + step["learnSeconds"] + step["waitSeconds"]
    assert parts == pytest.approx(step["stepSeconds"])
    assert f"{step['stepSeconds']:,.1f} s" in shown
    assert all(f"  {sentence}\n" in shown for sentence in answer["advice"])
    assert json.loads(moejob("plan", str(ACCEPTED), "-o", "json").stdout)["rolloutTime"] is None
    assert json.loads(moejob("plan", str(EXAMPLES / "tiny-grpo.yaml"), "-o", "json").stdout)["rolloutTime"] is None


def test_auto_says_what_no_layout_mends() -> None:
    wishes = ("--auto", "--model", "Qwen/Qwen3-Next-80B-A3B-Instruct", "--gpus", "8", "--gpu-type", "H100")
    answer = moejob("plan", *wishes, "--method", "GRPO")
    assert answer.returncode == 1
    assert "refused spec.model.source: no engine was seen" in answer.stdout


def test_ranks_lists_every_rank() -> None:
    rows = [line.split() for line in moejob("plan", str(ACCEPTED), "--ranks").stdout.splitlines()]
    assert [row[0] for row in rows if len(row) > 10 and row[0].isdigit()] == [str(rank) for rank in range(16)]


def test_pods_prints_the_first_pod_of_each_role_with_the_patch_of_the_job(tmp_path: Path) -> None:
    template = {"spec": {"containers": [{"name": "daemon", "image": "registry.example/daemon:1"}]}}
    answer = moejob("plan", str(EXAMPLES / "tiny-grpo.yaml"), "--pods", "--set", "grpo.rollout.placement=Separate")
    assert answer.returncode == 0, answer.stderr
    roles = [pod["metadata"]["labels"]["moejob.dev/role"] for pod in yaml.safe_load_all(answer.stdout)]
    assert roles == ["trainer", "rollout"]
    job = yaml.safe_load(ACCEPTED.read_text())
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job | {"spec": job["spec"] | {"podTemplate": {"trainer": template}}}))
    [pod] = yaml.safe_load_all(moejob("plan", str(file), "--pods").stdout)
    assert [entry["name"] for entry in pod["spec"]["initContainers"]] == ["daemon"]
    refused = moejob("plan", str(REFUSED), "--pods")
    assert (refused.returncode, "refused" in refused.stdout) == (1, True)


def test_another_number_of_gpus_is_refused_with_layouts_for_it() -> None:
    answer = json.loads(moejob("plan", str(EXAMPLES / "qwen3-30b-sft-8gpu.yaml"), "--gpus", "16", "-o", "json").stdout)
    assert answer["problems"][0]["rule"] == "GpuCount"
    assert answer["suggestions"][0]["gpus"] == 16


def test_validate_checks_several_jobs_and_fails_when_one_is_wrong() -> None:
    answer = moejob("validate", str(ACCEPTED), str(REFUSED))
    assert answer.returncode == 1
    assert f"{ACCEPTED}: accepted" in answer.stdout
    assert f"{REFUSED}: spec.parallelism.expert: " in answer.stdout


def test_validate_names_a_field_that_does_nothing(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(ACCEPTED.read_text().replace("resources: {", "resources: {rolloutImage: registry/engine, "))
    answer = moejob("validate", str(file))
    assert answer.returncode == 0
    note, accepted = answer.stdout.splitlines()
    assert note.startswith(f"{file}: note spec.resources.rolloutImage: resources.rolloutImage does nothing")
    assert accepted == f"{file}: accepted"


def test_validate_goes_on_behind_a_job_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(ACCEPTED.read_text().replace("expert: 4", "exprt: 4"))
    answer = moejob("validate", str(file), str(ACCEPTED))
    assert answer.returncode == 2
    assert f'error: {file}: spec.parallelism.exprt: unknown field "exprt"; did you mean "expert"?' in answer.stderr
    assert f"{ACCEPTED}: accepted" in answer.stdout


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(b"", "holds no document", id="empty file"),
        pytest.param(b"\xff\xfe\x00", "UTF-8", id="not text"),
        pytest.param(b"a: 1\na: 2\n", "given a second time", id="duplicate key"),
        pytest.param(b"kind: Deployment\napiVersion: apps/v1\n", "Deployment", id="another kind"),
    ],
)
def test_unreadable_input_exits_2_with_one_message(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(content)
    answer = moejob("plan", str(file))
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert says in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("place", ["nowhere.yaml", "."], ids=["missing file", "a folder"])
def test_a_place_that_is_no_file_exits_2(tmp_path: Path, place: str) -> None:
    answer = moejob("plan", str(tmp_path / place))
    assert answer.returncode == 2
    assert answer.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(("plan",), "FILE", id="no file"),
        pytest.param(("plan", "--auto"), "--model", id="auto of nothing"),
        pytest.param(("plan", "--auto", "--model", "Qwen/Qwen3-30B-A3B"), "--gpus", id="auto without GPUs"),
        pytest.param(
            ("plan", "--auto", "--model", "no/such", "--gpus", "8"), "--auto has to see it", id="unseen model"
        ),
        pytest.param(
            ("plan", "--auto", "--model", "Qwen/Qwen3-30B-A3B", "--gpus", "8", "--gpu-type", "H1"),
            "H100",
            id="GPU type",
        ),
        pytest.param(("plan", "x.yaml", "--gpus", "0"), "--gpus", id="no GPUs"),
        pytest.param(("plan", "x.yaml", "--gpu-type", "H100"), "only with --auto", id="auto's option without auto"),
        pytest.param(("plan", "--auto", "--pods"), "--pods", id="pods of a layout that is not chosen"),
        pytest.param(("frobnicate",), "frobnicate", id="unknown command"),
    ],
)
def test_a_misused_command_exits_2_and_names_the_option(arguments: tuple[str, ...], says: str) -> None:
    answer = moejob(*arguments)
    assert answer.returncode == 2
    assert says in answer.stderr
    assert "Traceback" not in answer.stderr


def test_auto_writes_a_job_that_is_accepted_as_it_stands(tmp_path: Path) -> None:
    better = tmp_path / "better.yaml"
    wishes = ("--model", "Qwen/Qwen3-30B-A3B", "--gpus", "16", "--gpu-type", "H100", "--global-batch", "64")
    answer = moejob("plan", "--auto", *wishes, "--write", str(better))
    assert answer.returncode == 0, answer.stderr
    assert "tokens/s/GPU" in answer.stdout
    again = json.loads(moejob("plan", str(better), "-o", "json").stdout)
    assert again["accepted"] is True
    assert again["layout"]["gpus"] == 16


def test_auto_never_overwrites_a_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("precious")
    answer = moejob("plan", str(ACCEPTED), "--auto", "--write", str(mine))
    assert answer.returncode == 2
    assert "left as it is" in answer.stderr
    assert mine.read_text() == "precious"


def test_auto_takes_speeds_that_a_person_knows_better() -> None:
    wishes = ("--auto", "--model", "Qwen/Qwen3-30B-A3B", "--gpus", "16", "--gpu-type", "H100", "-o", "json")
    slow = json.loads(moejob("plan", *wishes, "--network", "1", "--nvlink", "5").stdout)
    fast = json.loads(moejob("plan", *wishes).stdout)
    assert slow["choices"][0]["stepSeconds"] > fast["choices"][0]["stepSeconds"]


def test_auto_on_too_few_gpus_says_what_is_missing() -> None:
    wishes = ("--auto", "--model", "deepseek-ai/DeepSeek-V3", "--gpus", "8", "--gpu-type", "A100")
    answer = moejob("plan", *wishes)
    assert answer.returncode == 1
    assert "no layout on these GPUs" in answer.stdout
    assert "the leanest of" in answer.stdout
    assert "A100 has 79.1 GiB; use more GPUs" in answer.stdout


def test_the_schema_is_the_definition_that_the_chart_installs() -> None:
    definition = yaml.safe_load(moejob("schema").stdout)
    assert definition["kind"] == "CustomResourceDefinition"
    assert definition["metadata"]["name"] == "moetrainingjobs.moejob.dev"


def test_a_field_is_set_for_one_command() -> None:
    job = str(EXAMPLES / "tiny-sft.yaml")
    assert "tensor 1 x context 1 x data 4" in moejob("plan", job, "--set", "parallelism.expert=4").stdout
    assert moejob("validate", job, "--set", "parallelism.expert=3").returncode == 1
    mistyped = moejob("validate", job, ACCEPTED.as_posix(), "--set", "training.maxStep=2")
    assert mistyped.returncode == 2
    assert mistyped.stderr.count('did you mean "maxSteps"?') == 2
    refused = moejob("run", job, "--set", "parallelism.expert=3")
    assert (refused.returncode, "refused" in refused.stdout) == (1, True)
    chosen = moejob("plan", "--auto", "--gpus", "8", job, "--set", "resources.gpuType=H1000")
    assert (chosen.returncode, "H100" in chosen.stderr) == (2, True)
    without = moejob("plan", "--auto", "--model", "Qwen/Qwen3-30B-A3B", "--gpus", "8", "--set", "a=b")
    assert (without.returncode, "changes the job of a file" in without.stderr) == (2, True)


@pytest.mark.parametrize(("typed", "meant"), [("plna", "plan"), ("valdate", "validate"), ("exprot", "export")])
def test_a_mistyped_command_is_answered_with_the_one_that_is_meant(typed: str, meant: str) -> None:
    answer = moejob(typed, "job.yaml")
    assert answer.returncode == 2
    assert f"Did you mean '{meant}'?" in answer.stderr


def test_the_list_of_commands_cuts_no_sentence_off() -> None:
    commands = moejob("--help", COLUMNS="80").stdout.partition("Commands:")[2]
    assert "..." not in commands
    assert "plan      Say what a job takes, or why it is refused." in commands


def test_chat_with_a_job_of_a_cluster_says_how_its_model_comes_here() -> None:
    answer = moejob("chat", "my-job", "hello")
    assert (answer.returncode, len(answer.stderr.splitlines())) == (78, 1)
    assert "`moejob export my-job --out FOLDER` fetches that of a job" in answer.stderr


def test_the_version_is_an_option_and_a_command() -> None:
    assert moejob("--version").stdout == moejob("version").stdout != ""


def test_version_and_help_answer() -> None:
    assert moejob("version").stdout.startswith("moejob 0.")
    assert "validate" in moejob("--help").stdout


def test_completion_can_be_shown_for_a_shell() -> None:
    answer = moejob("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert answer.returncode == 0
    assert "complete" in answer.stdout


@pytest.mark.parametrize(
    ("words", "completed"),
    [("moejob pl", ["plan"]), ("moejob plan --ou", ["--output"]), ("moejob plan --output j", ["json"])],
)
def test_a_word_is_completed_without_what_reads_jobs(words: str, completed: list[str]) -> None:
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1), "_MOEJOB_COMPLETE": "complete_bash"}
    answer = ended("print(*sorted({'pydantic', 'yaml', 'rich'} & {*sys.modules}), file=sys.stderr)", **asked)
    assert answer.stdout.split() == completed
    assert answer.stderr.split() == []


# What a job takes that is refused, or that is to get another layout.
UNASKED = {
    "moejob_api.documents.wording",
    "moejob_api.job.fields",
    "moejob_api.planner.memory.remedies",
    "moejob_api.planner.nearest",
    "moejob_api.planner.search",
    "moejob_api.planner.suggestions",
}


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        pytest.param(["--help"], {"moejob_api.job", "pydantic", "rich", "yaml"}, id="help"),
        pytest.param(["plan", "--help"], {"moejob_api.job", "rich", "yaml"}, id="help of a command"),
        pytest.param(["version"], {"moejob_api.job", "pydantic", "rich", "yaml"}, id="version"),
        pytest.param(["validate", str(ACCEPTED)], {"rich", *UNASKED}, id="validate"),
        pytest.param(["plan", str(ACCEPTED), "--output", "json"], {"rich", *UNASKED}, id="a plan for programs"),
        pytest.param(["plan", str(ACCEPTED)], {"rich._emoji_codes", *UNASKED}, id="a plan for people"),
    ],
)
def test_a_command_waits_for_no_import_that_it_does_not_need(arguments: list[str], unneeded: set[str]) -> None:
    answer = ended(f"print(*sorted({unneeded} & {{*sys.modules}}), file=sys.stderr)", *arguments)
    assert answer.returncode == 0
    assert answer.stderr.split() == []


@pytest.mark.parametrize("arguments", [["get"], ["get", "a", "-o", "json"], ["watch"], ["top", "a"], ["steps", "a"]])
def test_a_verb_of_a_cluster_waits_for_neither_models_nor_tables(arguments: list[str], tmp_path: Path) -> None:
    heavy = {"pydantic", "rich", "moejob_api.job.job", "moejob_api.diagnosis.diagnose", "moejob_cli.sweeps"}
    heavy |= {"moejob_client.cluster_checks", "moejob_client.pod_exec", "moejob_client.rank_stacks"}
    program = f"print(*sorted({heavy} & {{*sys.modules}}), file=sys.stderr)"
    answer = ended(program, *arguments, KUBECONFIG=str(tmp_path / "none"), KUBERNETES_SERVICE_HOST="")
    assert answer.returncode == 4
    *message, modules = answer.stderr.split("\n", 1)
    assert message[0].startswith("error: no cluster is configured")
    assert modules.split() == []


def test_a_verb_of_a_cluster_reads_no_authorities_of_the_system(tmp_path: Path) -> None:
    count = "import ssl, aiohttp.connector as c; print(len(c._SSL_CONTEXT_VERIFIED.get_ca_certs()), "
    count += "len(ssl.create_default_context().get_ca_certs()), file=sys.stderr)"
    answer = ended(count, "get", KUBECONFIG=str(tmp_path / "none"), KUBERNETES_SERVICE_HOST="")
    installed = len(ssl.create_default_context().get_ca_certs())
    assert answer.stderr.splitlines()[1] == f"0 {installed}"


@pytest.mark.parametrize("verb", ["compare", "steps"])
def test_a_verb_on_runs_of_this_machine_waits_for_no_client(verb: str, tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("first", "second")]
    for run in runs:
        run.mkdir()
        (run / RunFile.STEPS).write_text('{"step": 1, "loss": 2.0}\n')
    answer = ended(
        "print(*sorted({'aiohttp', 'moejob_client.api_client'} & {*sys.modules}), file=sys.stderr)",
        verb,
        *map(str, runs if verb == "compare" else runs[:1]),
    )
    assert (answer.returncode, answer.stderr.split()) == (0, [])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["get", "-o", "xml"], "'xml' is not one of 'table', 'json', 'yaml'"),
        (["top", "job", "--every", "soon"], "--every"),
        (["board", "--port", "70000"], "--port"),
    ],
)
def test_a_value_that_an_option_does_not_take_is_refused(arguments: list[str], words: str) -> None:
    answer = moejob(*arguments)
    assert answer.returncode == 2
    assert words in " ".join(answer.stderr.split())


def test_a_plan_ends_before_garbage_is_collected() -> None:
    answer = ended("print([before, gc.get_stats()], file=sys.stderr)", "plan", str(ACCEPTED))
    before, after = json.loads(answer.stderr.replace("'", '"'))
    assert after == before


@pytest.mark.parametrize(
    "command",
    [*app.registered_commands, *verbs.registered_commands, *model_commands.registered_commands],
    ids=lambda command: command.callback.__name__,
)
def test_the_types_of_options_are_no_text_that_typer_would_evaluate(command: CommandInfo) -> None:
    assert command.callback is not None
    assert not [name for name, kind in command.callback.__annotations__.items() if isinstance(kind, str)]


def test_a_reader_that_goes_away_is_no_error() -> None:
    job = EXAMPLES / "llama-405b-grpo-256gpu.yaml"
    command = f"{sys.executable} -m moejob_cli plan {job} --ranks | head -1; exit ${{PIPESTATUS[0]}}"
    answer = subprocess.run(["/bin/bash", "-c", command], capture_output=True, text=True, check=False, timeout=300)
    assert answer.returncode == 0
    assert answer.stderr == ""


def test_a_fault_of_moejob_itself_is_one_line_unless_debugging(tmp_path: Path) -> None:
    broken = tmp_path / "moejob_api"
    broken.mkdir()
    (broken / "__init__.py").write_text("")
    (broken / "problems.py").write_text("class InvalidSpec(ValueError): ...\n")
    answer = moejob("validate", str(ACCEPTED), PYTHONPATH=str(tmp_path))
    assert answer.returncode == 70
    assert answer.stderr.count("\n") == 1
    assert "fault of its own" in answer.stderr

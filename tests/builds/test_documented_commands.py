"""Every command of every page is run by a test, or says what it needs that a test does not have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from documented import ROOT, TypedCommand, run_in_shell, started_modules, typed_commands
from evidence import reached_words, read_evidence
from moejob_api.documents.reading import read_job

PLANE = "tests/cluster/control_plane"
CLUSTER = f"{PLANE}/test_documented_commands.py::test_the_commands_of_a_page_are_answered"
PAGES = "tests/cli/test_pages.py::test_a_plan_that_is_shown_is_made"
TINY_RUN = "tests/trainer/test_run_tiny.py::test_a_killed_rank_goes_on_from_a_checkpoint"
DEMO = "tests/trainer/test_demo.py::test_the_first_command_trains_a_model_and_asks_it"
HERE = "tests/builds/test_documented_commands.py"
EXPORT = "tests/trainer/checkpoint_export/test_checkpoint_export.py::test_the_command_exports_an_earlier_step_too"
HELM_TEST = f"{PLANE}/test_chart.py::test_helm_test_says_what_is_well_and_that_a_webhook_is_not_reached"
UNINSTALL = f"{PLANE}/test_chart.py::test_without_keep_an_uninstall_takes_jobs_along_and_nothing_sticks"
KIND = "tests/cluster/nodes/test_kind_demo.py::test_the_demo_for_docker_builds_installs_trains_and_asks_the_model"
CHART = "tests/chart/test_getting_started.py::test_what_is_installed_can_be_rendered"
STACKS = "tests/cli/cluster/test_verbs.py::test_stacks_are_printed_by_rank_and_a_pod_without_them_is_exit_1"
COMPARISON = (
    "tests/cli/board/test_comparison.py::test_a_person_sees_fields_and_curves_and_runs_of_one_name_by_their_folders"
)
# The first pattern that a command begins with counts. A proof is a test, or `needs` and what no test has.
PROOFS: dict[str, str] = {
    r"make demo$": DEMO,
    r"make setup-gpu$|export MOEJOB_TRAINER_PYTHON=": "needs a GPU",
    r"moejob (data|run) examples/qwen2\.5|\$MOEJOB_TRAINER_PYTHON examples/ask\.py ": "needs the hub and a GPU",
    r"make demo-grpo$": "tests/trainer/test_demo.py::test_the_second_demo_teaches_sums_by_their_reward",
    r"make kind-demo$": KIND,
    r"make images\b": KIND,
    r"make bases$": "tests/builds/test_bases.py::test_every_base_of_every_dockerfile_gets_its_digest",
    r"source \.venv/operator/bin/activate$": DEMO,
    r"moejob (plan|validate) ": PAGES,
    r"moejob run ": TINY_RUN,
    r"moejob data ": "tests/trainer/data/test_preview.py::test_the_command_prints_it_marked",
    r"moejob export ": EXPORT,
    r"moejob stacks ": STACKS,
    r"moejob submit ": f"{PLANE}/test_verbs.py::test_a_sweep_creates_a_job_of_each_value",
    r"moejob open ": "tests/cli/cluster/test_verbs.py::test_the_page_of_a_job_is_served_from_a_copy_until_ctrl_c",
    r"moejob compare ": COMPARISON,
    r"moejob chat ": "tests/trainer/test_chat.py::test_a_prompt_of_the_command_line_or_of_a_pipe_is_answered_once",
    r"\.venv/trainer/bin/python examples/ask\.py ": DEMO,
    r"(cp|sed -i) .*job\.yaml$": f"{HERE}::test_the_layout_of_a_copied_example_is_changed_by_a_line",
    r"(grep|kill) .*runs/killed/": f"{HERE}::test_the_process_of_the_last_rank_is_found_in_the_log",
    r"kubectl |sed .* \| kubectl ": CLUSTER,
    r"helm (install|upgrade) moejob ": CHART,
    r"helm test moejob ": HELM_TEST,
    r"helm uninstall moejob ": UNINSTALL,
    r"MOEJOB_OPERATOR_\w+=false .*kopf run ": f"{PLANE}/test_operator_process.py",
    r"helm (repo add|install gpu-operator) ": "needs nodes with GPUs, and NVIDIA's registry",
    r"docker push |skopeo copy ": "needs a registry of the reader",
    r"tar .* \| ctr ": "needs a node with containerd that the reader is on",
    r"apt-get install ": ".ci/run",
}


def proof(command: str) -> str:
    return next((proof for pattern, proof in PROOFS.items() if re.match(pattern, command)), "")


@pytest.mark.parametrize("one", typed_commands(), ids=str)
def test_a_command_of_a_page_has_a_proof(one: TypedCommand) -> None:
    assert proof(one.command), "run it in a test and name that here, or say what it needs that no test has"


@pytest.mark.parametrize("found", sorted(set(PROOFS.values())))
def test_a_proof_is_there(found: str) -> None:
    if "::" in found:
        read_evidence(found)
    elif not found.startswith("needs "):
        assert (ROOT / found).is_file()


@pytest.mark.parametrize("typed_command", typed_commands("moejob ", "make ", "helm "), ids=str)
def test_a_proof_types_what_the_command_does(typed_command: TypedCommand) -> None:
    """The command of the program is a word somewhere in what the test comes to."""
    found = proof(typed_command.command)
    if found.startswith("needs "):
        return
    action = typed_command.command.split()[1]
    words = re.compile(rf"\b{re.escape(action)}\b")
    assert any(words.search(word) for word in reached_words(found)), f"{found} never comes to {action!r}"


def test_a_module_that_a_page_starts_is_a_program() -> None:
    folders = [ROOT, ROOT / "tests", *ROOT.glob("*/src")]
    places = {module: [folder / module.replace(".", "/") for folder in folders] for module in started_modules()}
    assert len(places) > 10
    assert [
        module
        for module, found in places.items()
        if not any((place / "__main__.py").exists() or place.with_suffix(".py").exists() for place in found)
    ] == []


def test_no_proof_is_for_a_command_that_no_page_has() -> None:
    used = {proof(one.command) for one in typed_commands()}
    assert set(PROOFS.values()) - used == set()


def test_the_second_demo_is_two_runs_and_a_look_at_their_answers() -> None:
    named = re.findall(r"examples/\S+", run_in_shell("make --dry-run demo-grpo", ROOT).stdout)
    assert named == ["examples/tiny-sft-sums.yaml", "examples/tiny-grpo.yaml", "examples/answers.py"]
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_layout_of_a_copied_example_is_changed_by_a_line(tmp_path: Path) -> None:
    commands = [
        one.command for one in typed_commands("cp examples/", "sed -i") if one.page == "docs/tutorials/resharding.md"
    ]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command in commands:
        assert run_in_shell(command, tmp_path).returncode == 0
    parallelism = read_job((tmp_path / "job.yaml").read_text(), "job.yaml").spec.parallelism
    assert (parallelism.expert, parallelism.tensor) == (1, 2)


def test_the_process_of_the_last_rank_is_found_in_the_log(tmp_path: Path) -> None:
    """The launcher's line, as tests of real runs read it, and the page's way to the number in it."""
    [command] = [one.command for one in typed_commands("kill -9")]
    log = tmp_path / "runs/killed/logs/pod-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("t INFO ranks started ranks=[0, 1] pids=[11, 12]\nt INFO ranks started ranks=[0, 1] pids=[21, 22]\n")
    said = run_in_shell(command.replace("kill -9", "echo"), tmp_path)
    assert said.stdout == "22\n"

"""The notebook of the examples, cell by cell in one process, before a stand-in of an API server with a run folder."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from documented import ROOT
from moejob_api.contract.stacks import STACKS_MODULE, RankStacks, stacks_line
from pod_log_server import NAMESPACE, ServedPod, serve_pod_logs

NOTEBOOK = ROOT / "examples" / "steer-a-job.ipynb"
# A notebook shows the last value of a cell; these print it.
PROGRAM = """
import ast, json, sys
names = {}
for source in json.load(sys.stdin):
    *statements, last = ast.parse(source).body
    exec(compile(ast.Module(statements, []), "cell", "exec"), names)
    print(json.dumps(eval(compile(ast.Expression(last.value), "cell", "eval"), names)))
"""


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def write_run(folder: Path) -> None:
    (folder / "samples").mkdir(parents=True)
    (folder / "export").mkdir()
    (folder / "steps.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.25}\n')
    answers = [{"prompt": "2+2?", "answer": answer, "reward": reward} for answer, reward in (("5", 0.0), ("4", 1.0))]
    (folder / "samples" / "step-2.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    (folder / "export" / "config.json").write_text("{}")


def test_each_cell_gives_what_the_run_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    run = tmp_path / "run"
    write_run(run)
    kubeconfig = tmp_path / "kubeconfig"
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    async def story() -> list[object]:
        async with serve_pod_logs() as (server, client), asyncio.timeout(60):
            server.run_folder = run
            server.status["display"] = {"step": "2/20"}
            line = stacks_line(RankStacks(0, 7, ("Thread", "in step")))
            server.modules[STACKS_MODULE] = f"print({line!r})"
            await server.add_pod(ServedPod("job-0", "uid-0"))
            context = {"name": "c", "context": {"cluster": "c", "namespace": NAMESPACE}}
            clusters = [{"name": "c", "cluster": {"server": client.host}}]
            kubeconfig.write_text(json.dumps({"current-context": "c", "contexts": [context], "clusters": clusters}))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", PROGRAM),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=tmp_path,
                env=os.environ | {"KUBECONFIG": str(kubeconfig)},
            )
            output, _ = await process.communicate(json.dumps(code_cells()).encode())
            assert process.returncode == 0
            return [json.loads(value) for value in output.splitlines()]

    assert asyncio.run(story()) == [
        [["job", "Running"]],
        "uid-job",
        ["job", "Running", "2/20"],
        {"1": 2.5, "2": 2.25},
        ["2+2?", "4", 1.0],
        {"0": "in step"},
        1,
    ]
    assert (tmp_path / "model" / "config.json").read_text() == "{}"

"""Below a run folder everything is written through `moejob_trainer.runtime.disk`, or stands here with a reason.

A file that is written otherwise may be empty after a loss of power, under a name that the next start trusts.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAINER, CLI, ROLLOUT = "trainer/src/moejob_trainer", "cli/src/moejob_cli", "rollout/src/moejob_rollout"
SOURCES = sorted(path for package in (TRAINER, CLI, ROLLOUT) for path in (ROOT / package).rglob("*.py"))

# Methods and functions that write or name a file, whatever their arguments.
WRITES = frozenset(
    [
        "copy",
        "copy2",
        "copyfile",
        "copyfileobj",
        "copytree",
        "hardlink_to",
        "link",
        "make_archive",
        "mkdtemp",
        "mkstemp",
        "move",
        "renames",
        "save_file",
        "save_pretrained",
        "savez",
        "symlink",
        "symlink_to",
        "tofile",
        "touch",
        "truncate",
        "unpack_archive",
        "write_bytes",
        "write_text",
        "NamedTemporaryFile",
        "TemporaryDirectory",
        "TemporaryFile",
    ]
)
# Of these modules alone: other things have methods of these names.
OF_MODULES = {"copy": ("shutil",), "move": ("shutil",), "link": ("os",), "save": ("np", "numpy", "torch")}
# Of a path with its new name, and of `os`; those of Disk, of texts and of times take other arguments.
RENAMES = frozenset({"rename", "replace"})
OPENS = frozenset({"open", "fdopen"})
FLAGS = frozenset({"O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND", "O_TRUNC"})

# Writes elsewhere than through the helper, by file and way, each with the reason.
ELSEWHERE: Mapping[tuple[str, str], str] = {
    (f"{TRAINER}/runtime/disk.py", "write_bytes"): "the helper",
    (f"{TRAINER}/runtime/disk.py", "open"): "the helper",
    (f"{TRAINER}/runtime/disk.py", "rename"): "the helper",
    (f"{TRAINER}/runtime/disk.py", "hardlink_to"): "the helper",
    (f"{TRAINER}/runtime/disk.py", "truncate"): "the helper: cuts half a line and syncs",
    (f"{TRAINER}/conversion/safetensors_writer.py", "open"): "weights, tensor by tensor; `verify` syncs and reads back",
    (f"{TRAINER}/conversion/safetensors_writer.py", "truncate"): "the size of that file",
    (f"{TRAINER}/conversion/adapters.py", "save_file"): "in a folder that publish_folder syncs",
    (f"{TRAINER}/data/links.py", "open"): "in a folder that publish_folder syncs",
    (f"{TRAINER}/data/links.py", "copyfileobj"): "in a folder that publish_folder syncs",
    (f"{TRAINER}/data/corpus.py", "open"): "in a folder that publish_folder syncs",
    (f"{TRAINER}/data/corpus.py", "save"): "in a folder that publish_folder syncs",
    (f"{TRAINER}/data/prompt_corpus.py", "open"): "in a folder that publish_folder syncs",
    (f"{TRAINER}/data/prompt_corpus.py", "save"): "in a folder that publish_folder syncs",
    (f"{TRAINER}/model/pretrained.py", "save_pretrained"): "in a folder that keep_folder syncs",
    (f"{TRAINER}/interchange/torch_dist.py", "write_text"): "in a folder that publish_folder syncs",
    (f"{TRAINER}/interchange/torch_dist.py", "save"): "in a folder that publish_folder syncs",
    (f"{TRAINER}/tracking/reporter.py", "open"): "steps.jsonl: synced before each marker, mended at each start",
    (f"{TRAINER}/runtime/share_display.py", "fdopen"): "a terminal or a pipe, which another process has opened",
    (f"{TRAINER}/runtime/fencing.py", "open"): "a fence token is a name; its folder is synced",
    (f"{TRAINER}/runtime/fencing.py", "touch"): "a probe, removed at once",
    (
        f"{TRAINER}/rollouts/transports/disk.py",
        "save_file",
    ): "weights on their way to engines: no later start reads them",
    (f"{TRAINER}/runtime/heartbeats.py", "open"): "in the temporary folder of a launcher",
    (f"{TRAINER}/runtime/heartbeats.py", "write_text"): "in the temporary folder of a launcher",
    (f"{TRAINER}/runtime/heartbeats.py", "write_bytes"): "in the temporary folder of a launcher",
    (f"{TRAINER}/runtime/heartbeats.py", "replace"): "in the temporary folder of a launcher",
    (f"{TRAINER}/launcher/fork_server.py", "write_text"): "in the temporary folder of a launcher",
    (f"{TRAINER}/launcher/termination_message.py", "write_bytes"): "the termination message of a pod",
    (f"{TRAINER}/launcher/output.py", "open"): "logs: nothing reads them but people",
    (f"{TRAINER}/launcher/engine_processes.py", "open"): "logs: nothing reads them but people",
    (f"{TRAINER}/launcher/entry.py", "fdopen"): "standard output",
    (f"{TRAINER}/launcher/stacks.py", "open"): "a file in memory",
    (f"{CLI}/running/engines.py", "open"): "logs: nothing reads them but people",
    (f"{CLI}/running/processes.py", "open"): "logs: nothing reads them but people",
    (f"{CLI}/board/step_columns.py", "open"): "the user's cache: read again where it is damaged",
    (f"{CLI}/board/step_columns.py", "replace"): "the user's cache: read again where it is damaged",
    (f"{CLI}/board/commands.py", "open"): "a report that a user asks for, in no run folder",
    (f"{CLI}/chat.py", "TemporaryFile"): "what a program says when it ends, shown and gone",
    (f"{CLI}/chat.py", "TemporaryDirectory"): "an export for one conversation, removed with it",
    ("rollout/src/moejob_rollout/chat.py", "fdopen"): "standard output",
    (f"{TRAINER}/chat.py", "fdopen"): "standard output",
    (f"{CLI}/cluster/page.py", "TemporaryDirectory"): "a copy for a page, removed with it",
    (f"{CLI}/running/decisions.py", "open"): "a log of lines, synced; its reader leaves half lines out",
    (f"{CLI}/running/folder.py", "open"): "run.lock is empty; `_write` syncs file and folders",
    (f"{CLI}/running/folder.py", "fdopen"): "`_write` syncs file and folders",
    (f"{CLI}/running/folder.py", "replace"): "`_write` syncs file and folders",
    (
        f"{CLI}/running/trainer_environment.py",
        "open",
    ): "a lock without content, and a log that nothing reads but people",
    (
        f"{CLI}/running/trainer_environment.py",
        "touch",
    ): "the user's cache: an environment without its stamp is made again",
    (f"{CLI}/choosing.py", "open"): "a job file that a user asks for, in no run folder",
    (f"{CLI}/__main__.py", "open"): "/dev/null",
}


def writing(source: str) -> Iterator[str]:
    """Yield each way in which a module writes files."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            module, name = _called(node.func)
            if name in OPENS and _is_for_writing(node):
                yield name
            elif name in OF_MODULES:
                if module in OF_MODULES[name]:
                    yield name
            elif name in WRITES or (name in RENAMES and _is_of_path(node, module)):
                yield name


def _called(function: ast.expr) -> tuple[str, str]:
    match function:
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return module, name
        case ast.Attribute(attr=name):
            return "?", name
        case ast.Name(id=name):
            return "", name
        case _:
            return "", ""


def _is_of_path(call: ast.Call, module: str) -> bool:
    return module == "os" or (module != "" and len(call.args) == 1 and not call.keywords)


def _is_for_writing(call: ast.Call) -> bool:
    named = {node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute)}
    modes = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    texts = {mode.value for mode in modes if isinstance(mode, ast.Constant) and isinstance(mode.value, str)}
    return bool(named & FLAGS) or any(set(text) & set("wax+") and set(text) <= set("rwaxbt+") for text in texts)


@pytest.mark.parametrize(
    "source",
    [
        "open(path, 'w')",
        "open(path, mode='ab')",
        "path.open('wb')",
        "path.open('r+b')",
        "gzip.open(path, 'wt')",
        "os.open(path, os.O_CREAT | os.O_RDWR)",
        "os.fdopen(3, 'w')",
        "path.write_text(text)",
        "(folder / name).write_bytes(content)",
        "path.rename(other)",
        "path.replace(other)",
        "os.replace(path, other)",
        "shutil.copy(path, other)",
        "tokenizer.save_pretrained(folder)",
        "save_file(tensors, path)",
        "np.save(path, rows)",
        "torch.save(state, path)",
        "tempfile.mkdtemp(dir=folder)",
    ],
)
def test_each_way_to_write_is_found(source: str) -> None:
    assert [*writing(source)]


@pytest.mark.parametrize(
    "source",
    [
        "open(path)",
        "path.open('rb')",
        "os.open(path, os.O_RDONLY)",
        "text.replace('a', 'b')",
        "disk.rename(unfinished, path)",
        "replace(Disk(), path, content)",
        "time.replace(microsecond=0)",
        "run.save(step)",
        "Target.open(folder, table)",
    ],
)
def test_what_writes_no_file_is_left_alone(source: str) -> None:
    assert not [*writing(source)]


def test_no_source_writes_otherwise_than_through_the_helper() -> None:
    assert len(SOURCES) > 200
    found = {(str(path.relative_to(ROOT)), way) for path in SOURCES for way in writing(path.read_text())}
    assert sorted(found - ELSEWHERE.keys()) == []
    assert sorted(ELSEWHERE.keys() - found) == []

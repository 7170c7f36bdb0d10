"""Files, text and API bodies as jobs. Every fault in them is an InvalidSpec, never another error.

The first refused job imports the words of refusals and the tables of fields: accepted jobs do without them.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError

from moejob_api.documents.syntax import UnreadableError
from moejob_api.documents.tree import parse_documents
from moejob_api.documents.values import has_null, plain_fields
from moejob_api.job import API_VERSIONS, GROUP, KIND, VERSION, Metadata, MoETrainingJob, Spec
from moejob_api.problems import InvalidSpec, Problem, Rule

# etcd holds 1.5 MiB at most.
MAX_BYTES = 1024 * 1024
STANDARD_INPUT = "-"
_MOST_COMPARED = 1000

_METADATA = frozenset(field.alias or name for name, field in Metadata.model_fields.items())


def read_file(path: str | Path, settings: Sequence[str] = ()) -> MoETrainingJob:
    """The job in a YAML or JSON file, with the fields that are set beside it; `-` reads standard input."""
    return parse_job(read_file_tree(path, settings))


def read_file_tree(path: str | Path, settings: Sequence[str] = (), kind: str = KIND) -> dict[str, JsonValue]:
    """The plain fields of the one object in a file, which should be of a kind; nothing checks them yet."""
    name = "standard input" if str(path) == STANDARD_INPUT else str(path)
    try:
        return _read_tree(_read_content(str(path)), name, settings, kind)
    except OSError as error:
        raise _unreadable_error(f"{name}: {_describe_os_error(error, Path(path))}") from None


def read_job(text: bytes | str, name: str, settings: Sequence[str] = ()) -> MoETrainingJob:
    """The job in a YAML or JSON text, which messages call `name`, with settings as training.maxSteps=20 made in it."""
    return parse_job(_read_tree(text, name, settings, KIND))


def _read_tree(text: bytes | str, name: str, settings: Sequence[str], kind: str) -> dict[str, JsonValue]:
    try:
        documents = parse_documents(_decode_text(text))
    except UnreadableError as error:
        place = name if error.line is None else f"{name}, line {error.line}"
        raise _unreadable_error(f"{place}: {error.reason}", error.path) from None
    if not documents:
        raise _unreadable_error(f"{name}: holds no document; write a {kind} into it")
    if len(documents) > 1:
        raise _unreadable_error(_several_documents_message(documents, name, kind))
    if not isinstance(documents[0], dict):
        raise _unreadable_error(f"{name}: holds {_value_noun(documents[0])} where the fields of a {kind} should be")
    return _with_settings(documents[0], settings)


def _with_settings(tree: dict[str, JsonValue], settings: Sequence[str]) -> dict[str, JsonValue]:
    if not settings:
        return tree
    from moejob_api.documents.settings import parse_setting, with_settings

    return with_settings(tree, [parse_setting(text) for text in settings])


def parse_job(raw: Mapping[str, Any]) -> MoETrainingJob:
    """The job in an API object, without the metadata that Kubernetes keeps for itself."""
    job = _parse_body(raw)
    name = job.metadata.name
    if job.spec.checkpoint.resume_from != name:
        return job
    message = f"{name} is this job itself, which resumes from its own checkpoints anyway; name another job or remove it"
    raise InvalidSpec((Problem(Rule.CONFLICT, "spec.checkpoint.resumeFrom", message),))


def parse_spec(raw: object) -> Spec:
    """The spec of a job whose name is not known."""
    frame = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": {"name": "job"}}
    return _parse_body({**frame, "spec": raw}).spec


def _parse_body(raw: Mapping[str, Any]) -> MoETrainingJob:
    tree = plain_fields({name: _known_metadata(name, value) for name, value in raw.items()})
    if tree.get("apiVersion") not in API_VERSIONS or tree.get("kind") != KIND:
        from moejob_api.documents.wording import wrong_kind

        raise InvalidSpec((wrong_kind(tree),))
    body = _without_dropped_nulls(tree)
    try:
        return MoETrainingJob.model_validate_json(json.dumps(body), by_alias=True, by_name=False)
    except ValidationError as error:
        from moejob_api.documents.wording import problems_of

        raise InvalidSpec(problems_of(error, body)) from None


def _without_dropped_nulls(tree: dict[str, JsonValue]) -> JsonValue:
    if not has_null(tree):
        return tree
    from moejob_api.documents.nulls import without_dropped_nulls

    return without_dropped_nulls(tree)


def _known_metadata(name: object, value: object) -> object:
    if name != "metadata" or not isinstance(value, Mapping):
        return value
    return {key: inner for key, inner in value.items() if key in _METADATA}


def _read_content(path: str) -> bytes:
    if path == STANDARD_INPUT:
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    if "\0" in path:
        raise OSError(errno.EINVAL, "its name holds a NUL character")
    with Path(path).open("rb") as file:
        return file.read(MAX_BYTES + 1)


def _describe_os_error(error: OSError, path: Path) -> str:
    match error:
        case FileNotFoundError():
            similar_file = _similar_file(path)
            return f"no such file; did you mean {similar_file}?" if similar_file else "no such file; check the path"
        case IsADirectoryError():
            return "a folder, not a file; name one file in it"
        case PermissionError():
            return "not readable for you; check its permissions"
        case _:
            return f"cannot be read: {error.strerror or error}"


def _similar_file(path: Path) -> Path | None:
    """Return the job in the same folder whose name is most like the missing file's."""
    import difflib

    try:
        jobs = [file.name for file in path.parent.iterdir() if file.suffix in {".yaml", ".yml", ".json"}]
    except OSError:
        return None
    # Longer lists take seconds to compare, and belong to no folder of jobs.
    close_names = difflib.get_close_matches(path.name, sorted(jobs)[:_MOST_COMPARED], n=1)
    return path.with_name(close_names[0]) if close_names else None


def _decode_text(text: bytes | str) -> str:
    if len(text) > MAX_BYTES:
        raise UnreadableError(f"larger than {MAX_BYTES // 1024} KiB; a job is a few kilobytes")
    if isinstance(text, bytes):
        text = _decode_utf8(text)
    if any("\ud800" <= character <= "\udfff" for character in text if character > "\x7f"):
        raise UnreadableError("holds half of a character (a lone surrogate); save it as UTF-8")
    return text.removeprefix("\ufeff")


def _decode_utf8(text: bytes) -> str:
    if text.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UnreadableError("is UTF-16; save it as UTF-8")
    if b"\0" in text:
        raise UnreadableError("is not text but binary; name the job's YAML file")
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise UnreadableError(f"byte 0x{text[error.start]:02x} is not UTF-8; save the file as UTF-8", line) from None


def _several_documents_message(documents: list[JsonValue], name: str, kind: str) -> str:
    kinds = [str(tree.get("kind", "no kind")) if isinstance(tree, dict) else _value_noun(tree) for tree in documents]
    shown = ", ".join(kinds[:5]) + (", ..." if len(kinds) > 5 else "")
    return (
        f"{name}: holds {len(documents)} documents ({shown}); keep one {kind} in a file, "
        "for example with: csplit -z FILE '/^---/' '{*}'"
    )


def _value_noun(tree: JsonValue) -> str:
    match tree:
        case list():
            return "a list"
        case str():
            return "text"
        case _:
            return f"the value {json.dumps(tree)}"


def _unreadable_error(message: str, path: str = "") -> InvalidSpec:
    return InvalidSpec((Problem(Rule.UNREADABLE, path, message),))

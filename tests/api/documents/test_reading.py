"""Files and texts that are no job: each gives one clear sentence, and never anything but InvalidSpec."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from api_server import job_body
from builders import GRPO, SFT
from calls import count_calls
from moejob_api.documents import parse_job, read_file, read_job
from moejob_api.documents.reading import MAX_BYTES
from moejob_api.documents.tree import parse_documents
from moejob_api.job import MoETrainingJob
from moejob_api.problems import InvalidSpec, Problem, Rule

JOB = """\
apiVersion: moejob.dev/v1alpha1
kind: MoETrainingJob
metadata: {name: job}
spec:
  method: SFT
  model: {source: Qwen/Qwen3-30B-A3B}
  data:
    train:
    - {source: /data/train.jsonl, format: Chat}
  training: {maxSteps: 100, globalBatchSize: 64}
  storage: {size: 4Ti}
"""


def refusal(text: bytes | str) -> Problem:
    """The only problem of a text."""
    with pytest.raises(InvalidSpec) as refused:
        read_job(text, "job.yaml")
    [problem] = refused.value.problems
    return problem


def with_line(line: str) -> str:
    """The job with a line more at the end of its spec."""
    return f"{JOB}  {line}\n"


# --- what is read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(JOB, id="yaml"),
        pytest.param(JOB.encode(), id="bytes"),
        pytest.param(JOB.replace("\n", "\r\n"), id="windows line ends"),
        pytest.param(b"\xef\xbb\xbf" + JOB.encode(), id="byte order mark"),
        pytest.param(f"# a comment\n---\n{JOB}---\n# the end\n", id="empty documents around it"),
        pytest.param(f"{JOB}...\n", id="an end mark"),
        pytest.param(json.dumps(job_body(SFT)), id="json"),
        pytest.param(json.dumps(job_body(SFT), indent="\t"), id="json with tabs"),
        pytest.param(
            f"{{{', '.join(JOB.splitlines()[:3])}, spec: {json.dumps(SFT)}}}",
            id="yaml in braces",
        ),
    ],
)
def test_a_job_is_read_from(text: bytes | str) -> None:
    assert read_job(text, "job.yaml").spec == parse_job(job_body(SFT)).spec


def test_json_may_hold_characters_as_surrogate_pairs() -> None:
    text = json.dumps(job_body(SFT | {"data": {**SFT["data"], "chatTemplate": "\U0001f600"}}))
    assert "\\ud83d\\ude00" in text
    assert read_job(text, "job.json").spec.data.chat_template == "\U0001f600"


@pytest.mark.parametrize("written", ["8", "8.0", "8e0", "0o10", "010", "0x8", "+8", "0_8.0"])
def test_a_whole_number_may_be_written_in_every_way_kubectl_knows(written: str) -> None:
    assert read_job(with_line(f"parallelism: {{tensor: {written}}}"), "job.yaml").spec.parallelism.tensor == 8


def test_a_learning_rate_without_a_point_is_a_number() -> None:
    text = JOB.replace("maxSteps: 100", "maxSteps: 100, optimizer: {learningRate: 1e-5}")
    assert read_job(text, "job.yaml").spec.training.optimizer.learning_rate == 1e-5


def test_a_field_without_a_value_is_absent() -> None:
    job = read_job(with_line("parallelism:\n  lifecycle: {suspend: null}\n  resources: {labels: {a: ~}}"), "job.yaml")
    assert job == read_job(JOB, "job.yaml")


def test_what_kubernetes_adds_is_ignored() -> None:
    body = job_body(
        SFT,
        uid="0b5a",
        creationTimestamp="2025-01-01T00:00:00Z",
        managedFields=[{"manager": "kubectl", "fieldsV1": {"f:spec": {".": {}}}}],
        ownerReferences=[],
        labels={"a/b": "c"},
    )
    job = parse_job(body)
    assert (job.metadata.uid, dict(job.metadata.labels)) == ("0b5a", {"a/b": "c"})


def test_anchors_and_merges_are_read_as_kubectl_reads_them() -> None:
    text = JOB.replace("{source: /data/train.jsonl, format: Chat}", "&a {source: /data/train.jsonl, format: Chat}")
    read = read_job(
        text.replace("  training:", "    eval:\n    - {<<: *a, source: /eval.jsonl}\n  training:"), "job.yaml"
    )
    assert [(each.source, each.format) for each in read.spec.data.eval] == [("/eval.jsonl", "Chat")]


def test_the_first_of_several_merged_mappings_wins() -> None:
    assert parse_documents("{<<: [{a: 1}, {a: 2, b: 3}], c: 4}") == [{"a": 1, "b": 3, "c": 4}]


@pytest.mark.parametrize("key", ["1", "true", "'on'", '"1.5"', "!!str on"])
def test_a_name_that_kubectl_keeps_is_kept(key: str) -> None:
    read = parse_documents(f"{key}: x")
    assert read == [{key.removeprefix("!!str ").strip("'\""): "x"}]


def test_a_typical_job_is_read_with_little_work() -> None:
    read_job(JOB, "job.yaml")
    # 1,322, which are two milliseconds; YAML in Python alone takes ten times as many.
    assert count_calls(lambda: read_job(JOB, "job.yaml")) < 3000


# --- what is refused ------------------------------------------------------------------------------------------------

BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("", "holds no document", id="empty"),
        pytest.param("# nothing\n---\n", "holds no document", id="only comments"),
        pytest.param(b"\xff\xfea\0", "UTF-16; save it as UTF-8", id="utf-16"),
        pytest.param(b"\x7fELF\x00\x01", "not text but binary", id="binary"),
        pytest.param(b"a: b\nc: \xff\n", "line 2: byte 0xff is not UTF-8", id="latin-1"),
        pytest.param("a: \ud800", "half of a character", id="lone surrogate"),
        pytest.param("a: \x07", "control character", id="control character"),
        pytest.param("a" * (MAX_BYTES + 1), "larger than 1024 KiB", id="huge"),
        pytest.param("- a\n- b\n", "holds a list where the fields", id="list"),
        pytest.param("just words", "holds text where the fields", id="text"),
        pytest.param("42", "holds the value 42 where", id="number"),
        pytest.param(f"{JOB}---\n{JOB}", "holds 2 documents (MoETrainingJob, MoETrainingJob); keep one", id="two jobs"),
        pytest.param(f"{JOB}---\nkind: Secret\n---\n- 1\n", "(MoETrainingJob, Secret, a list)", id="several kinds"),
        pytest.param(f"--- {JOB}", "line 1: nothing may follow ---", id="text behind the separator"),
        pytest.param(f"%YAML 1.2\n---\n{JOB}", "begin with %; remove them", id="directive"),
        pytest.param("a:\n\tb: 1", "line 2: a tab indents the line; use spaces", id="tab"),
        pytest.param("a: @b", "line 1: text cannot begin with @; put it in quotes", id="at sign"),
        pytest.param("a: `b`", "cannot begin with `; put it in quotes", id="backtick"),
        pytest.param("a: b: c", "a second ': ' on the line", id="two colons"),
        pytest.param("a: 1\n  b: 2", "line 2: a second ': '", id="indented too far"),
        pytest.param("a:\n  b: 1\n c: 2", "line 3: the line does not continue", id="indented between"),
        pytest.param("  a: 1\nb: 2", "line 2: a line apart from all above it", id="first line indented"),
        pytest.param("- a\nb: c", "line 2: the line does not continue the list", id="list and mapping"),
        pytest.param("a: [1, 2", "a [ is not closed", id="open bracket"),
        pytest.param("a: {b: 1", "a { is not closed", id="open brace"),
        pytest.param("a: 'b\nc: d\n", "line 1: a quote is opened and never closed", id="open quote"),
        pytest.param('a: "\\q"', "an unknown \\", id="escape"),
        pytest.param("a: [http://x/?a=b]", "kubectl stops at the ?", id="question mark in brackets"),
        pytest.param("a: *b", "line 1: *b stands for nothing", id="alias of nothing"),
        pytest.param("a: &b [*b]", "*b stands for nothing", id="alias in itself"),
        pytest.param("a: {{ .Values.x }}", "in place of a field's name", id="template"),
        pytest.param("? [a]\n: b", "in place of a field's name", id="list as a name"),
        pytest.param("on: b", "YAML reads the name on as true; put it in quotes", id="on as a name"),
        pytest.param("1.30: b", "YAML reads the name 1.30 as 1.3; put", id="version as a name"),
        pytest.param("~: b", "YAML reads the name ~ as nothing", id="nothing as a name"),
        pytest.param("a: .inf", ".inf is not a number that Kubernetes can store", id="infinity"),
        pytest.param("a: .NaN", ".NaN is not a number", id="nan"),
        pytest.param("a: !!binary aGk=", "the tag !!binary is not for jobs", id="tag"),
        pytest.param("a: !Ref b", "the tag !Ref is not for jobs", id="own tag"),
        pytest.param("a: 1\nb: 2\na: 3", "line 3: given a second time, first on line 1; remove one", id="twice"),
        pytest.param('{"a": 1, "a": 2}', "given a second time", id="twice in json"),
        pytest.param("1: a\n'1': b", "given a second time", id="twice as number and text"),
        pytest.param("a: 1\n<<: {a: 2}", "<< gives a again", id="merge over a field"),
        pytest.param("<<: {a: 1}\n<<: {a: 2}", "given a second time", id="two merges"),
        pytest.param("<<: 5", "<< takes a mapping or a list of mappings", id="merge of a number"),
        pytest.param(BOMB, "too large with its aliases written out", id="alias bomb"),
        pytest.param("[" * 100_000, "nested more than 64 levels", id="deep brackets"),
        pytest.param("".join(" " * i + "a:\n" for i in range(70)), "nested more than 64 levels", id="deep indentation"),
        pytest.param("- " * 100_000 + "a", "nested more than 64 levels", id="deep dashes"),
        pytest.param('{"a":' * 70 + "1" + "}" * 70, "nested more than 64 levels", id="deep json"),
        pytest.param('{"a":' * 50_000 + "1" + "}" * 50_000, "nested more than 64 levels", id="very deep json"),
        pytest.param(
            "a: &a [" + "[" * 60 + "]" * 60 + "]\nb: [[[[[[*a]]]]]]", "nested more than 64", id="deep by alias"
        ),
    ],
)
def test_text_that_is_no_document_is_refused(text: bytes | str, says: str) -> None:
    problem = refusal(text)
    assert problem.rule is Rule.UNREADABLE or "nested" in problem.message
    assert says in str(problem)
    assert str(problem).count("\n") == 0


def test_a_field_given_twice_is_named_with_its_path_and_both_lines() -> None:
    problem = refusal(with_line("parallelism:\n    tensor: 1\n    tensor: 2"))
    assert str(problem) == (
        "spec.parallelism.tensor: job.yaml, line 14: given a second time, first on line 13; remove one"
    )


@pytest.mark.parametrize(
    ("change", "path", "says"),
    [
        pytest.param(("kind: MoETrainingJob", "kind: Deployment"), "kind", "this is a Deployment, not a Mo", id="kind"),
        pytest.param(("kind: MoETrainingJob", "kind: moetrainingjob"), "kind", "write kind: MoETrainingJob", id="case"),
        pytest.param(("kind: MoETrainingJob\n", ""), "kind", "is missing; write kind: MoETrainingJob", id="no kind"),
        pytest.param(("kind: MoETrainingJob", "kind: 5"), "kind", "must be MoETrainingJob, not 5", id="kind 5"),
        pytest.param(("v1alpha1", "v1"), "apiVersion", "the versions that this release reads", id="version"),
        pytest.param(
            ("apiVersion: moejob.dev/v1alpha1\n", ""), "apiVersion", "is missing; write apiV", id="no version"
        ),
        pytest.param(("name: job", "name: Job"), "metadata.name", "lower-case letters", id="name"),
        pytest.param(("name: job", "generateName: j"), "metadata.name", "is missing", id="no name"),
    ],
)
def test_an_object_that_is_no_job_is_refused_for_that_alone(change: tuple[str, str], path: str, says: str) -> None:
    problem = refusal(JOB.replace(*change))
    assert problem.path == path
    assert says in problem.message


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert _refused(tmp_path / "none.yaml").endswith("none.yaml: no such file; check the path")
    (tmp_path / "tiny-sft.yaml").touch()
    assert _refused(tmp_path / "tiny-sft.yml").endswith(f"no such file; did you mean {tmp_path}/tiny-sft.yaml?")
    assert _refused(tmp_path / "none.yaml").endswith("check the path")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert "a folder, not a file; name one file in it" in _refused(tmp_path)


def test_an_impossible_path_is_refused() -> None:
    assert "cannot be read" in _refused("\0")
    assert "cannot be read" in _refused("a" * 5000)


def test_an_endless_file_is_refused() -> None:
    assert "larger than" in _refused("/dev/zero")


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    assert read_file(tmp_path / "job.yaml") == read_job(JOB, "job.yaml")


def test_a_dash_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(JOB.encode())))
    assert read_file("-") == read_job(JOB, "job.yaml")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert "standard input: holds no document" in _refused("-")


# --- anything at all ------------------------------------------------------------------------------------------------

FRAGMENTS = [*"\n-:a1{}[],'\"|>#?@", "\n  ", "- ", ": ", "&a ", "*a", "<<: ", "!t "]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8)
NAMES = st.text(max_size=8)
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4))


@given(st.binary(max_size=200) | st.lists(st.sampled_from(FRAGMENTS), max_size=20).map("".join))
def test_no_text_raises_anything_but_invalid_spec(text: bytes | str) -> None:
    with pytest.raises(InvalidSpec):
        read_job(text, "job.yaml")


@given(TREES)
def test_no_body_raises_anything_but_invalid_spec(tree: Any) -> None:
    _parse({"apiVersion": "moejob.dev/v1alpha1", "kind": "MoETrainingJob", "metadata": {"name": "a"}, "spec": tree})
    _parse(tree if isinstance(tree, dict) else {"kind": tree})


@given(st.sampled_from(sorted(GRPO)), TREES)
def test_no_section_raises_anything_but_invalid_spec(section: str, tree: Any) -> None:
    _parse(job_body(GRPO | {section: tree}))


@given(st.dictionaries(st.text(max_size=5), TREES, min_size=1, max_size=5))
def test_yaml_that_pyyaml_writes_is_read_or_refused(tree: Any) -> None:
    with pytest.raises(InvalidSpec):
        read_job(yaml.safe_dump(tree), "job.yaml")


def _parse(body: Any) -> None:
    try:
        assert isinstance(parse_job(body), MoETrainingJob)
    except InvalidSpec as refused:
        assert refused.problems  # noqa: PT017 - either outcome is fine


def _refused(path: str | Path) -> str:
    with pytest.raises(InvalidSpec) as refused:
        read_file(path)
    return str(refused.value)

"""Jobs written as YAML: short, stable, and read back as what they were by everybody."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from api_server import job_body
from builders import GRPO, SFT, job, merge_sections
from field_cases import SPEC, build_example
from moejob_api.documents import dump_job, parse_job, read_job, yaml_text
from moejob_api.documents.tree import parse_documents

WORDS = ("1e-5", "0o17", "on", "~", "", "1_000", "=", "<<", ".inf", "a: b", "- a", "#", "\t")
BLANKS = (" a", "a ", "a\n", "\na", "a\n b\n", "a \nb", "\n", " \n")
TEXT = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(WORDS + BLANKS)
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
TREES = st.recursive(
    TEXT | NUMBERS | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
)


def test_only_what_differs_from_the_defaults_is_written() -> None:
    text = dump_job(job(parallelism={"tensor": 4, "pipeline": 1}, training={"optimizer": {"learningRate": 1e-6}}))
    assert (
        text
        == """\
apiVersion: moejob.dev/v1alpha1
kind: MoETrainingJob
metadata:
  name: job
spec:
  method: SFT
  model:
    source: Qwen/Qwen3-30B-A3B
  data:
    train:
    - source: /data/train.jsonl
      format: Chat
  parallelism:
    tensor: 4
  training:
    maxSteps: 100
    globalBatchSize: 64
    optimizer:
      learningRate: 1.0e-6
  storage:
    size: 4Ti
"""
    )


def test_an_optional_section_with_defaults_only_is_still_there() -> None:
    assert "    lora: {}\n" in dump_job(job(training={"lora": {}}))


def test_what_the_cluster_sets_is_not_written() -> None:
    body = job_body(SFT, uid="0b5a", generation=3) | {"status": {"phase": "Running", "attempt": 2}}
    assert dump_job(parse_job(body)) == dump_job(parse_job(job_body(SFT)))


@pytest.mark.parametrize("spec", [SFT, GRPO, build_example(SPEC)], ids=["sft", "grpo", "every field"])
def test_a_written_job_is_read_as_what_it_was(spec: dict[str, Any]) -> None:
    given = parse_job(job_body(spec, labels={"on": "yes", "a/b": "1e-5"}))
    text = dump_job(given)
    assert read_job(text, "job.yaml") == given
    assert dump_job(read_job(text, "job.yaml")) == text


@given(TEXT, TEXT, st.floats(1e-12, 10, exclude_min=True), st.dictionaries(TEXT, TEXT, max_size=3))
def test_any_text_and_number_comes_back(template: str, value: str, rate: float, labels: dict[str, str]) -> None:
    given = parse_job(
        job_body(
            merge_sections(
                SFT,
                {
                    "data": {"chatTemplate": template},
                    "training": {"optimizer": {"learningRate": rate}},
                    "resources": {"env": [{"name": "A", "value": value}]},
                },
            ),
            labels=labels,
        )
    )
    text = dump_job(given)
    assert read_job(text, "job.yaml") == given
    assert dump_job(read_job(text, "job.yaml")) == text


@given(TREES)
def test_any_value_is_read_alike_by_us_and_by_pyyaml(tree: Any) -> None:
    text = yaml_text({"it": tree})
    assert parse_documents(text) == [{"it": tree}]
    assert yaml.safe_load(text) == {"it": tree}


def test_kubectl_reads_what_is_written(kubectl: Callable[[str], Any]) -> None:
    template = "{%- for m in messages %}\n  <|{{ m.role }}|>: '{{ m.content }}'\n{%- endfor %}\n"
    spec = merge_sections(build_example(SPEC), {"data": {"chatTemplate": template}, "model": {"revision": "1e-5"}})
    written = parse_job(job_body(spec))
    below_spec = dump_job(written).partition("\nspec:\n")[2]
    assert parse_job(job_body(kubectl(_outdented(below_spec)))).spec == written.spec
    assert json.dumps(template) not in below_spec


def _outdented(text: str) -> str:
    return "".join(line.removeprefix("  ") for line in text.splitlines(keepends=True))

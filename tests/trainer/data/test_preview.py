"""A preview is what a run would read: trained tokens marked, everything counted, reasons for what is left out."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from builders import SFT, merge_sections, spec
from moejob_api.contract.data_preview import DatasetPreview, PreviewLimits
from moejob_api.job import Spec
from moejob_trainer.data.preview import preview_job_data
from moejob_trainer.errors import BadData
from trainer.training_data import make_chat, write_jsonl

# The command line has an environment of its own, which must never meet torch.
COMMAND = Path(__file__).parents[3] / ".venv/operator/bin/moejob"
TINY = {"model": {"source": "moejob/tiny-moe"}}


def previewed(job: Spec, records: int = 100, examples: int = 2) -> DatasetPreview:
    return preview_job_data(job, PreviewLimits(records, examples)).datasets[0]


def chats(tmp_path: Path, *answers: str, **data: Any) -> Spec:
    lines = [
        {"messages": [{"role": "user", "content": "2 + 3"}, {"role": "assistant", "content": answer}]}
        for answer in answers
    ]
    file = write_jsonl(tmp_path / "chats.jsonl", *lines)
    return spec(**merge_sections(TINY, {"data": {"train": [{"source": str(file), "format": "Chat"}], **data}}))


def test_what_the_assistant_says_is_marked(tmp_path: Path) -> None:
    found = previewed(chats(tmp_path, "5", "5", "5"))
    assert [(part.text, part.trained) for part in found.examples[0].parts] == [
        ("<|user|>2 + 3<|end|><|assistant|>", False),
        ("5<|end|>", True),
    ]
    assert [example.place.rpartition(", ")[2] for example in found.examples] == ["line 1", "line 2"]
    assert (found.records, found.kept, found.dropped, found.is_whole) == (3, 3, 0, True)
    assert found.trained_tokens == 6
    assert found.lengths == (found.tokens // 3,) * 3


@pytest.mark.parametrize(
    ("overlong", "counts", "reason"),
    [("Drop", (1, 0, 1), "data.maxLength is 16: dropped"), ("Truncate", (1, 1, 0), "truncated at the end")],
)
def test_a_record_that_is_too_long_is_named_with_the_reason(
    overlong: str, counts: tuple[int, int, int], reason: str, tmp_path: Path
) -> None:
    found = previewed(chats(tmp_path, "5", "five is what it makes " * 3, maxLength=16, overlong=overlong))
    assert (found.kept, found.truncated, found.dropped) == counts
    (left_out,) = found.left_out
    assert "line 2" in left_out.place
    assert reason in left_out.reason


def test_only_as_many_records_are_read_as_were_asked_for(tmp_path: Path) -> None:
    found = previewed(chats(tmp_path, "5", "5", "5"), records=2, examples=0)
    assert (found.records, found.is_whole, found.examples) == (2, False, ())


def test_prompts_leave_room_for_the_answer(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "prompts.jsonl", {"prompt": "2 + 3"}, {"prompt": "what is the sum of 2 and 3 " * 3})
    data = {"train": [{"source": str(file), "format": "Prompts"}], "maxLength": 24}
    found = previewed(spec(method="GRPO", **TINY, data=data, grpo={"maxNewTokens": 8}))
    assert [part.trained for part in found.examples[0].parts] == [False]
    assert (found.kept, found.dropped) == (1, 1)
    assert "data.maxLength less grpo.maxNewTokens is 16" in found.left_out[0].reason


def test_what_would_end_the_run_ends_the_preview(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "other.jsonl", {"question": "2 + 3"})
    with pytest.raises(BadData, match="line 1: there is no messages; found question"):
        previewed(spec(**TINY, data={"train": [{"source": str(file), "format": "Chat"}]}))


LONG = "what is 2 + 3 " * 3


@pytest.mark.parametrize(
    ("format", "records", "said"),
    [
        pytest.param("Chat", [], "is empty; name another, or remove it", id="no conversation"),
        pytest.param("Chat", [make_chat(LONG, "5")], "none of the 1 records .* raise maxLength", id="all too long"),
        pytest.param("Prompts", [], "has 0 prompts, and none of at most 8 tokens", id="no prompt"),
        pytest.param(
            "Prompts", [{"prompt": LONG}], "has 1 prompts, and none of at most 8 tokens", id="no short prompt"
        ),
    ],
)
def test_data_of_which_nothing_is_left_ends_the_preview_as_it_ends_the_run(
    format: str,  # noqa: A002
    records: list[dict[str, Any]],
    said: str,
    tmp_path: Path,
) -> None:
    file = write_jsonl(tmp_path / "data.jsonl", *records)
    data = {"train": [{"source": str(file), "format": format}], "maxLength": 16}
    method = {"method": "GRPO", "grpo": {"maxNewTokens": 8}} if format == "Prompts" else {}
    with pytest.raises(BadData, match=said):
        previewed(spec(**TINY, **method, data=data))


def test_records_that_were_not_read_may_be_kept(tmp_path: Path) -> None:
    found = previewed(chats(tmp_path, "five is what it makes " * 3, "5", maxLength=16), records=1)
    assert (found.kept, found.dropped, found.is_whole) == (0, 1, False)


@pytest.mark.slow
def test_the_command_prints_it_marked(tmp_path: Path) -> None:
    job = chats(tmp_path, "5")
    frame = {"apiVersion": "moejob.dev/v1alpha1", "kind": "MoETrainingJob", "metadata": {"name": "job"}}
    described = merge_sections(
        SFT, {**TINY, "data": job.data.model_dump(mode="json", by_alias=True, exclude_none=True)}
    )
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(frame | {"spec": described}))
    done = subprocess.run([COMMAND, "data", file], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "<|user|>2 + 3<|end|><|assistant|>⟦5<|end|>⟧" in done.stdout
    assert "all 1 records" in done.stdout

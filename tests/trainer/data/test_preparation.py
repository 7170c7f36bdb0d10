"""Data sets become corpora: what is counted, dropped, refused, kept for the next start, and found damaged."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from moejob_api.job.model import DataFormat, OverlongSamples, TrainedTurns
from moejob_trainer.data import tiny
from moejob_trainer.data.corpus import Corpus
from moejob_trainer.data.file_contents import HASHED_FILES, read_contents
from moejob_trainer.data.preparation import prepare_datasets
from moejob_trainer.data.prepared_folder import DamagedData
from moejob_trainer.errors import BadData
from trainer.training_data import make_chat, make_recipe, make_source, prepare_corpora, write_jsonl


def texts(folder: Path, *contents: str) -> Path:
    return write_jsonl(folder / "texts.jsonl", *({"text": content} for content in contents))


def test_documents_are_what_was_encoded_in_order(tmp_path: Path) -> None:
    chats = write_jsonl(tmp_path / "chats.jsonl", make_chat("3 + 4", "7"), make_chat("say hello", "hello"))
    [corpus] = prepare_corpora(tmp_path / "out", make_recipe(make_source(chats, DataFormat.CHAT)))
    using = tiny.build_tokenizer()
    first, second = corpus.read_document(0), corpus.read_document(1, source=3)
    assert using.decode(first.tokens) == "<|user|>3 + 4<|end|><|assistant|>7<|end|>"
    assert using.decode(second.tokens[second.weights > 0]) == "hello<|end|>"
    assert (second.id, second.source) == (1, 3)
    assert corpus.lengths.tolist() == [len(first.tokens), len(second.tokens)]
    assert corpus.trained_tokens.tolist() == [first.loss_weight, second.loss_weight] == [2, 6]


def test_the_same_source_may_be_mixed_in_with_all_turns_and_with_the_last_alone(tmp_path: Path) -> None:
    every = make_source(
        write_jsonl(tmp_path / "chats.jsonl", make_chat("3 + 4", "7", "say hello", "hello")), DataFormat.CHAT
    )
    last = every.model_copy(update={"trained_turns": TrainedTurns.LAST})
    found = prepare_corpora(tmp_path / "out", make_recipe(every, last))
    assert [corpus.report.trained_tokens for corpus in found] == [8, 6]
    assert found[0].report.tokens == found[1].report.tokens


@pytest.mark.parametrize(
    ("overlong", "counts", "lengths"),
    [
        # Of 3, 6 and 4 tokens, the end included.
        pytest.param(
            OverlongSamples.DROP, {"documents": 2, "dropped": 1, "truncated": 0, "tokens": 7}, [3, 4], id="drop"
        ),
        pytest.param(
            OverlongSamples.TRUNCATE,
            {"documents": 3, "dropped": 0, "truncated": 1, "tokens": 11},
            [3, 4, 4],
            id="truncate",
        ),
    ],
)
def test_what_is_too_long_is_counted(
    tmp_path: Path, overlong: OverlongSamples, counts: dict[str, int], lengths: list[int]
) -> None:
    source = texts(tmp_path, "zz", "zzzzz", "zzz")
    [corpus] = prepare_corpora(tmp_path / "out", make_recipe(make_source(source), max_length=4, overlong=overlong))
    assert corpus.lengths.tolist() == lengths
    assert corpus.report.records == 3
    assert {name: getattr(corpus.report, name) for name in counts} == counts
    assert corpus.report.trained_tokens == sum(length - 1 for length in lengths)


def test_what_is_too_long_is_named_where_it_is_to_be_refused(tmp_path: Path) -> None:
    source = texts(tmp_path, "zz", "zzzzz")
    with pytest.raises(BadData, match=rf"^{source}, line 2 has 6 tokens, data.maxLength is 4 and data.overlong Refuse"):
        prepare_corpora(
            tmp_path / "out", make_recipe(make_source(source), max_length=4, overlong=OverlongSamples.REFUSE)
        )


def test_a_conversation_cut_before_its_answer_is_dropped_and_counted_as_such(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "chats.jsonl", make_chat("zzzzzzzzzz", "a"), make_chat("z", "a"))
    using = make_recipe(make_source(source, DataFormat.CHAT), max_length=8, overlong=OverlongSamples.TRUNCATE)
    [corpus] = prepare_corpora(tmp_path / "out", using)
    assert (corpus.report.documents, corpus.report.emptied, corpus.report.truncated) == (1, 1, 0)


@pytest.mark.parametrize(
    ("contents", "overlong", "said"),
    [
        pytest.param((), OverlongSamples.DROP, r"\(split train\) is empty", id="no record"),
        pytest.param(
            ("zzzzz", "zzzzzz"), OverlongSamples.DROP, "none of the 2 records .* 4 .2 dropped", id="all too long"
        ),
    ],
)
def test_a_data_set_without_documents_is_refused(
    tmp_path: Path, contents: tuple[str, ...], overlong: OverlongSamples, said: str
) -> None:
    source = texts(tmp_path, *contents)
    with pytest.raises(BadData, match=said):
        prepare_corpora(tmp_path / "out", make_recipe(make_source(source), max_length=4, overlong=overlong))
    assert [path.name for path in (tmp_path / "out").iterdir()] == [HASHED_FILES]


def test_a_token_that_the_model_does_not_know_is_refused(tmp_path: Path) -> None:
    source = texts(tmp_path, "a", " good")
    small = make_recipe(make_source(source))
    largest = max(tiny.build_tokenizer()(" good")["input_ids"])
    with pytest.raises(
        BadData, match=rf"line 2 has the token {largest}, and the model moejob/tiny-moe knows {largest};"
    ):
        prepare_datasets(small.data.train, type(small)(small.model, small.data, vocabulary=largest), tmp_path / "out")


def test_what_was_prepared_is_kept_until_something_changes(tmp_path: Path) -> None:
    source = texts(tmp_path, "a", "b")
    using = make_recipe(make_source(source))
    [first] = prepare_datasets(using.data.train, using, tmp_path / "out")
    written = (first / "report.json").stat().st_mtime_ns
    assert prepare_datasets(using.data.train, using, tmp_path / "out") == (first,)
    assert (first / "report.json").stat().st_mtime_ns == written
    others = [
        make_recipe(make_source(source), max_length=8),
        make_recipe(make_source(source), overlong=OverlongSamples.REFUSE),
    ]
    texts(tmp_path, "a", "b", "c")
    paths = {prepare_datasets(one.data.train, one, tmp_path / "out")[0] for one in [using, *others]}
    assert len(paths | {first}) == 4
    assert all(len(Corpus(path)) == 3 for path in paths)


def test_data_is_known_by_its_content_and_not_by_its_times(tmp_path: Path) -> None:
    source = texts(tmp_path, "a", "b")
    using = make_recipe(make_source(source))
    [first] = prepare_datasets(using.data.train, using, tmp_path / "out")
    os.utime(source, (1, 1))
    assert prepare_datasets(using.data.train, using, tmp_path / "out") == (first,)
    # Of the same size, and of the same time to the nanosecond.
    texts(tmp_path, "a", "c")
    os.utime(source, (1, 1))
    [other] = prepare_datasets(using.data.train, using, tmp_path / "out")
    assert other != first
    texts(tmp_path, "a", "b")
    assert prepare_datasets(using.data.train, using, tmp_path / "out") == (first,)


@pytest.mark.parametrize("left", [b"", b"\0" * 50, b"{"], ids=["empty", "zeros", "half"])
def test_a_damaged_note_of_what_was_hashed_costs_nothing_but_time(tmp_path: Path, left: bytes) -> None:
    using = make_recipe(make_source(texts(tmp_path, "a", "b")))
    [first] = prepare_datasets(using.data.train, using, tmp_path / "out")
    (tmp_path / "out" / HASHED_FILES).write_bytes(left)
    assert prepare_datasets(using.data.train, using, tmp_path / "out") == (first,)


def test_data_that_is_as_it_was_is_not_read_again(tmp_path: Path) -> None:
    source = texts(tmp_path, "a", "b")
    read_contents({"texts.jsonl": source}, tmp_path)
    note = tmp_path / HASHED_FILES
    note.write_text(note.read_text().replace('"content": "', '"content": "of before '))
    assert "of before" in read_contents({"texts.jsonl": source}, tmp_path)
    source.touch()
    assert "of before" not in read_contents({"texts.jsonl": source}, tmp_path)


def test_half_written_data_is_never_taken_for_whole(tmp_path: Path) -> None:
    source = texts(tmp_path, "a", "b")
    using = make_recipe(make_source(source))
    [path] = prepare_datasets(using.data.train, using, tmp_path / "out")
    (path / "report.json").unlink()
    with pytest.raises(DamagedData, match="does not hold prepared data, or not all of it"):
        Corpus(path)
    assert [len(Corpus(again)) for again in prepare_datasets(using.data.train, using, tmp_path / "out")] == [2]


@pytest.mark.parametrize("name", ["tokens.bin", "trained.bin", "sizes.npy", "report.json"])
def test_damage_is_found_when_data_is_opened(tmp_path: Path, name: str) -> None:
    using = make_recipe(make_source(texts(tmp_path, "abc", "defg")))
    [path] = prepare_datasets(using.data.train, using, tmp_path / "out")
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[:-4])
    with pytest.raises(DamagedData, match=str(path)):
        Corpus(path)


# What a loss of power leaves of a file whose name was durable before its content was.
@pytest.mark.parametrize("left", [b"", bytes(4096)], ids=["empty", "zeros"])
@pytest.mark.parametrize("name", ["tokens.bin", "trained.bin", "sizes.npy", "report.json"])
def test_prepared_data_that_lost_a_file_is_built_again_by_the_next_start(
    tmp_path: Path, name: str, left: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    using = make_recipe(make_source(texts(tmp_path, "abc", "defg")))
    [path] = prepare_datasets(using.data.train, using, tmp_path / "out")
    whole = {file.name: file.read_bytes() for file in path.iterdir()}
    (path / name).write_bytes(left)
    assert prepare_datasets(using.data.train, using, tmp_path / "out") == (path,)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == whole
    assert "prepared data is built again" in capfd.readouterr().err
    assert {file.name for file in path.parent.iterdir()} == {path.name, HASHED_FILES}


def test_a_count_that_was_changed_is_found_when_data_is_opened(tmp_path: Path) -> None:
    using = make_recipe(make_source(texts(tmp_path, "abc", "defg")))
    [path] = prepare_datasets(using.data.train, using, tmp_path / "out")
    sizes = np.load(path / "sizes.npy")
    sizes[1, 1] += 1
    np.save(path / "sizes.npy", sizes)
    with pytest.raises(DamagedData, match="damaged since it was written"):
        Corpus(path)


@pytest.mark.parametrize("name", ["tokens.bin", "trained.bin"])
def test_a_document_that_is_as_long_as_before_and_another_is_found_when_it_is_read(tmp_path: Path, name: str) -> None:
    using = make_recipe(make_source(texts(tmp_path, "abc", "defg")))
    [path] = prepare_datasets(using.data.train, using, tmp_path / "out")
    content = bytearray((path / name).read_bytes())
    content[-1] ^= 1
    (path / name).write_bytes(content)
    corpus = Corpus(path)
    assert len(corpus.read_document(0).tokens) == corpus.lengths[0]
    with pytest.raises(DamagedData, match="damaged since it was written; the next start"):
        corpus.read_document(1)
    # What a start does not read as a whole is built again when a document was found to differ.
    [again] = prepare_datasets(using.data.train, using, tmp_path / "out")
    assert len(Corpus(again).read_document(1).tokens) == corpus.lengths[1]


@pytest.mark.slow
def test_several_processes_write_what_one_writes(tmp_path: Path) -> None:
    # More than one process is worth starting for.
    source = texts(tmp_path, *(f"{number} + {number}" for number in range(5000)))
    using = make_recipe(make_source(source))
    [alone], [together] = (prepare_datasets(using.data.train, using, tmp_path / str(n), workers=n) for n in (1, 2))
    for name in ("tokens.bin", "trained.bin", "sizes.npy", "report.json"):
        assert (alone / name).read_bytes() == (together / name).read_bytes()
    assert len(np.fromfile(alone / "tokens.bin", np.int32)) == Corpus(alone).report.tokens


@pytest.mark.slow
def test_a_fault_found_in_another_process_is_told_in_full(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "texts.jsonl", *({"text": "a"} for _ in range(4500)), {"txt": "a"})
    using = make_recipe(make_source(source))
    with pytest.raises(BadData, match=f"^{source}, line 4501: there is no text; found txt$"):
        prepare_datasets(using.data.train, using, tmp_path / "out", workers=2)

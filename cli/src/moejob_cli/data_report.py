"""The data of a job as a person reads it. Decides nothing and prints nothing."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from moejob_api.contract.data_preview import DataPreview, DatasetPreview, PreviewedExample
from moejob_api.contract.pods import escaped_text, printable_text

# Brackets around trained tokens: colour alone would be lost in a file.
OPEN, CLOSE = "⟦", "⟧"


def data_report(preview: DataPreview) -> RenderableType:
    """The whole answer of `moejob data`."""
    return Group(*(line for dataset in preview.datasets for line in _dataset_lines(dataset)))


def _dataset_lines(dataset: DatasetPreview) -> Iterator[RenderableType]:
    record_extent = "all" if dataset.is_whole else "the first"
    yield Text.assemble(
        (dataset.part, "bold"),
        escaped_text(
            f"  {dataset.source}, split {dataset.split}, {dataset.format}: {record_extent} {dataset.records:,} records"
        ),
    )
    yield Text(f"  kept {dataset.kept:,}, truncated {dataset.truncated:,}, dropped {dataset.dropped:,}")
    if dataset.lengths is not None:
        shortest, median, longest = dataset.lengths
        share = dataset.trained_tokens / dataset.tokens
        yield Text(
            f"  {dataset.tokens:,} tokens, {dataset.trained_tokens:,} of them trained on ({share:.0%}); "
            f"lengths {shortest:,} to {longest:,}, median {median:,}"
        )
    for record in dataset.left_out:
        yield Text.assemble(("  left out  ", "yellow"), escaped_text(f"{record.place}: {record.reason}"))
    hidden = dataset.truncated + dataset.dropped - len(dataset.left_out)
    if hidden > 0:
        yield Text.assemble(("  left out  ", "yellow"), f"and {hidden:,} more")
    for example in dataset.examples:
        yield from _example_lines(example)
    yield Text()


def _example_lines(example: PreviewedExample) -> Iterator[RenderableType]:
    yield Text()
    yield Text(
        f"  {escaped_text(example.place)}: {example.tokens:,} tokens, {example.trained_tokens:,} trained on",
        style="bold",
    )
    text = Text()
    for part in example.parts:
        # Data comes from anywhere: characters that a terminal would obey become blanks, except line ends.
        shown = "\n".join(map(printable_text, part.text.split("\n")))
        text.append(f"{OPEN}{shown}{CLOSE}" if part.trained else shown, "green" if part.trained else "")
    yield Padding(text, (0, 0, 0, 4))

"""The table of model families in README.md, made of the tables that plan, webhook and trainer read.

    python scripts/model_table.py [--check]

A family that is added gets its row by `make generate`. Only the words on what was seen beyond tiny models with random
weights stand here; each names its proof.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from moejob_api.models.catalog import find_config, shipped_names
from moejob_api.models.families import READ_AS, TEXT_PARTS, shape_of
from moejob_api.models.shape import Family
from moejob_api.models.trainable import CONVERTED_FAMILIES, MEGATRON_FAMILIES

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- families: start -->\n", "<!-- families: end -->\n"
_HEAD = (
    "| `model_type` | configurations that moejob has | layers of Megatron-Core | Megatron's checkpoints | seen "
    "beyond tiny random models |\n|---|---|---|---|---|\n"
)
# The models that come with moejob are no one's to look for.
OWN = "moejob"
# What was seen of a family beyond that, with the page or the test that shows it.
SEEN: Mapping[Family, str] = {
    Family.LLAMA: "published weights (SmolLM2-135M): [GRPO on a GPU, three seeds](benchmarks/grpo-learning.md)",
    Family.MIXTRAL: "a mixture made of SmolLM2's weights: [GRPO on a GPU, three seeds](benchmarks/grpo-learning.md); "
    "[steps of 8x7B's layers on GPUs](benchmarks/training-gpu.md)",
    Family.QWEN3_MOE: "a mixture made of SmolLM2's weights, beside Transformers; [steps of 30B-A3B's layers on GPUs]"
    "(benchmarks/training-gpu.md)",
}


def table_text() -> str:
    """Return the table, a row for each family."""
    return _HEAD + "".join(_rows())


def _rows() -> Iterator[str]:
    names: dict[Family, list[str]] = {family: [] for family in Family}
    for name in shipped_names():
        organization, _, model = name.partition("/")
        if organization != OWN:
            names[shape_of(find_config(name)).family].append(model)
    for family in Family:
        marks = ["yes" if family in families else "no" for families in (MEGATRON_FAMILIES, CONVERTED_FAMILIES)]
        types = [family, *(name for name, read_as in {**READ_AS, **TEXT_PARTS}.items() if read_as is family)]
        cells = [", ".join(f"`{name}`" for name in types), ", ".join(names[family]), *marks, SEEN.get(family, "")]
        yield f"| {' | '.join(cells)} |\n"


def with_table(page: str) -> str:
    """Return a page with the table as it should be between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table_text() + END + after


def main() -> int:
    """Write the table; with --check, only say that it is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the table is stale")
    page = README.read_text(encoding="utf-8")
    if page == with_table(page):
        return 0
    if parser.parse_args().check:
        sys.stderr.write("README.md: the table of families is stale; run make generate\n")
        return 1
    README.write_text(with_table(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

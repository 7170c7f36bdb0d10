"""The features that this version trains, as data: plan, webhook and trainer read the same tables.

A model family may be planned with (its shape is known) and still not be trained. What one job's settings exclude of one
another is in rules/; here is what no job can have at all.
"""

from __future__ import annotations

from collections.abc import Mapping

from moejob_api.models.shape import Family

# Families whose shape is read and whose layers are not all there, each with what is missing.
UNTRAINED_FAMILIES: Mapping[Family, str] = {
    Family.QWEN3_NEXT: "Qwen3-Next needs layers of the gated delta rule, and the trainer has none",
}
# Families that publish all experts as one tensor, for which PEFT has no adapters.
UNADAPTED_EXPERTS = frozenset({Family.GPT_OSS})

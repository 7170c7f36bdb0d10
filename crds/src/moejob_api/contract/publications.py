"""The report of an engine on the weights that it was sent, before it computes with them: JSON.

A parameter that no tensor was loaded into keeps the weights of before, and an engine answers with those as readily as
with right ones. In bfloat16 the difference can be smaller than that of roundings, so engines count instead.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class PublicationReport(BaseModel):
    """The tensors of a publication that are not as they have to be; all fields are empty where it is whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Tensors that did not come, or whose parameter was filled in part, by the names that files have for them.
    missing: tuple[str, ...]
    # Tensors that came more than once: what they fill twice is counted twice.
    repeated: tuple[str, ...]
    # Tensors whose bytes are others than those that were sent.
    changed: tuple[str, ...]

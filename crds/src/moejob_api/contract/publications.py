"""The report of an engine on the weights that it was sent, before it computes with them: JSON.

If no tensor is loaded into a parameter, the parameter keeps its old weights, and the engine answers all the same. In
bfloat16 the answers can differ less than by rounding, so engines count tensors instead of comparing answers.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class PublicationReport(BaseModel):
    """The faulty tensors of a publication; all fields are empty if the publication is whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Tensors that did not come, or filled only a part of their parameter, by their names in files.
    missing: tuple[str, ...]
    # Tensors that came more than once: elements filled twice are counted twice.
    repeated: tuple[str, ...]
    # Tensors that arrived with other bytes than the trainer sent.
    changed: tuple[str, ...]

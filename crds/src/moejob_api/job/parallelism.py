"""The spread of model and batch over GPUs."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from moejob_api.job.base import ApiModel, GroupSize


class ExpertLayout(StrEnum):
    """The factor that `expert` is in the number of GPUs."""

    PRODUCT = "Product"
    FOLDED = "Folded"


class Parallelism(ApiModel):
    """Sizes of the parallel groups; the number of GPUs follows from them."""

    tensor: Annotated[
        GroupSize, Field(description="GPUs that share every matrix of a layer (TP), inside one node.")
    ] = 1
    pipeline: Annotated[GroupSize, Field(description="Stages the layers are cut into (PP).")] = 1
    expert: Annotated[GroupSize, Field(description="GPUs that share the experts of a layer (EP).")] = 1
    context: Annotated[GroupSize, Field(description="GPUs that share every sequence (CP).")] = 1
    data: Annotated[
        GroupSize, Field(description="Replicas of the model so divided, each with a share of every batch (DP).")
    ] = 1
    expert_layout: Annotated[
        ExpertLayout,
        Field(
            description="Product: GPUs = tensor x pipeline x expert x context x data. Folded: GPUs = tensor x pipeline "
            "x context x data, and the experts are spread over tensor x context x data."
        ),
    ] = ExpertLayout.PRODUCT
    expert_tensor: Annotated[
        GroupSize | None,
        Field(
            description=(
                "GPUs that share the matrices of one expert (ETP). Absent: 1 for Folded; Product always takes tensor."
            )
        ),
    ] = None
    virtual_pipeline: Annotated[
        GroupSize | None,
        Field(description="Model chunks per pipeline stage (interleaved schedule). Absent or 1: not interleaved."),
    ] = None
    first_stage_layers: Annotated[
        GroupSize | None, Field(description="Layers of the first stage. Absent: like the others.")
    ] = None
    last_stage_layers: Annotated[
        GroupSize | None, Field(description="Layers of the last stage. Absent: like the others.")
    ] = None
    embedding_counts_as_layer: Annotated[
        bool, Field(description="The embedding takes the place of one layer in the first stage.")
    ] = False
    loss_counts_as_layer: Annotated[
        bool, Field(description="The output layer and loss take the place of one layer in the last stage.")
    ] = False
    sequence: Annotated[
        bool | None,
        Field(
            description="Split the sequence over the tensor group where tensors are not split (sequence parallelism). "
            "Absent: on whenever tensor is above 1."
        ),
    ] = None

    @property
    def sequence_parallel(self) -> bool:
        """Return whether activations between the split matrices are divided over the tensor group."""
        return self.tensor > 1 and self.sequence is not False

"""The MoETrainingJob itself: what a person writes and what the cluster says about it."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from moejob_api.job.base import ApiModel, ObjectName, TextMap
from moejob_api.job.grpo import Grpo
from moejob_api.job.lifecycle import Lifecycle, Tracking
from moejob_api.job.model import Data, Model
from moejob_api.job.moe import Memory, MoE
from moejob_api.job.names import MAX_NAME
from moejob_api.job.parallelism import Parallelism
from moejob_api.job.pod_template import PodTemplates
from moejob_api.job.resources import Resources
from moejob_api.job.status import Status
from moejob_api.job.storage import Checkpoint, Storage
from moejob_api.job.training import Training


class Method(StrEnum):
    """The training method."""

    SFT = "SFT"
    GRPO = "GRPO"


class Spec(ApiModel):
    """The training run: model, data, layout, hyperparameters and pods."""

    method: Annotated[
        Method, Field(description="SFT learns from given answers, GRPO from rewards for answers it generates.")
    ]
    model: Annotated[Model, Field(description="The model to start from.")]
    data: Annotated[Data, Field(description="Training and evaluation data.")]
    parallelism: Annotated[Parallelism, Field(description="Sizes of the parallel groups.")] = Parallelism()
    training: Annotated[Training, Field(description="Length of the run, batches, optimizer.")]
    moe: Annotated[MoE, Field(description="Routing and experts.")] = MoE()
    memory: Annotated[Memory, Field(description="What lives in host memory and what is sharded.")] = Memory()
    grpo: Annotated[Grpo | None, Field(description="Settings of GRPO; given exactly when method is GRPO.")] = None
    checkpoint: Annotated[Checkpoint, Field(description="When the run is saved.")] = Checkpoint()
    storage: Annotated[Storage, Field(description="The volume for checkpoints and exports.")]
    resources: Annotated[Resources, Field(description="GPUs, images, placement.")] = Resources()
    profile: Annotated[
        ObjectName | None,
        Field(
            description="Name of a MoETrainingProfile of this namespace, or else of a ClusterMoETrainingProfile, whose "
            "values the job takes where it gives none. They stay as they were when the job was accepted."
        ),
    ] = None
    pod_template: Annotated[
        PodTemplates | None, Field(description="Patches of the pods: sidecars, volumes, affinity and others.")
    ] = None
    lifecycle: Annotated[Lifecycle, Field(description="Starting, stopping, retrying.")] = Lifecycle()
    tracking: Annotated[Tracking, Field(description="Where the numbers are sent.")] = Tracking()


class Metadata(ApiModel):
    """The part of Kubernetes' metadata that moejob reads; the rest is left to Kubernetes."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[
        str,
        Field(
            max_length=MAX_NAME,
            pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$",
            description="Name of the job, and the first part of the names of its pods.",
        ),
    ]
    namespace: Annotated[str | None, Field(max_length=63, description="Namespace.")] = None
    uid: Annotated[str | None, Field(description="Set by Kubernetes.")] = None
    generation: Annotated[int | None, Field(ge=0, description="Set by Kubernetes.")] = None
    labels: Annotated[TextMap, Field(description="Labels.")] = {}
    annotations: Annotated[TextMap, Field(description="Annotations.")] = {}


class MoETrainingJob(ApiModel):
    """One training run of a Mixture-of-Experts (or dense) model on a cluster of GPUs."""

    api_version: Annotated[
        Literal["moejob.dev/v1beta1", "moejob.dev/v1alpha1"],
        Field(description="moejob.dev/v1beta1, or moejob.dev/v1alpha1 with the same fields."),
    ]
    kind: Annotated[Literal["MoETrainingJob"], Field(description="MoETrainingJob")]
    metadata: Metadata
    spec: Annotated[Spec, Field(description="What to train, on what, and how.")]
    status: Annotated[Status | None, Field(description="What the operator sees; written by it alone.")] = None

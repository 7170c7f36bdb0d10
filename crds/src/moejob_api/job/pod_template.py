"""The patches of a job's pods, each as one object whose fields pod_template/fields.py knows."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from moejob_api.job.base import ApiModel

# A raw body of Kubernetes' API: its schema would be ten times as long as that of a job.
FreeObject = Annotated[Mapping[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]


class PodTemplates(ApiModel):
    """Patches of the pods of a job, as strategic merges over what the operator makes."""

    trainer: Annotated[
        FreeObject | None,
        Field(
            description="metadata and spec for trainer pods, merged as kubectl patch does; plan --pods shows the pod."
        ),
    ] = None
    rollout: Annotated[FreeObject | None, Field(description="The same for pods of separate engines.")] = None

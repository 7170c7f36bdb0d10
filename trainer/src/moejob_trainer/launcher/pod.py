"""The contract's environment as a frozen model: the operator (or `moejob run`) sets it for a launcher."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from moejob_api.contract.addresses import is_loopback
from moejob_api.contract.engines import colocated_per_pod
from moejob_api.contract.pod_environment import WrittenSpec, require_secret, split_hosts
from moejob_api.contract.pods import Environment, PodRole
from moejob_trainer.runtime.channel import attempt_key
from moejob_trainer.runtime.fencing import Fence, claim_key

_NonEmpty = Annotated[str, Field(min_length=1)]
_PortNumber = Annotated[int, Field(ge=1, le=65_535)]
_Count = Annotated[int, Field(ge=1, le=65_536)]


class TrainerPod(BaseModel):
    """One trainer pod. Each field is the variable of its name in the contract."""

    model_config = ConfigDict(frozen=True)

    job: _NonEmpty
    namespace: str
    uid: _NonEmpty
    spec: WrittenSpec
    role: Literal[PodRole.TRAINER]
    attempt: Annotated[int, Field(ge=0)]
    # The place in the gang. An index beyond the gang is a spare's: it has no place until another pod is lost.
    index: Annotated[int, Field(ge=0)]
    nodes: _Count
    spare_hosts: Annotated[tuple[str, ...], BeforeValidator(split_hosts)] = ()
    ranks_per_node: _Count
    rendezvous_host: _NonEmpty
    rendezvous_port: _PortNumber
    host: _NonEmpty
    node: str = ""
    run_folder: Path
    grace_seconds: Annotated[int, Field(ge=1)]
    progress_port: _PortNumber
    # Python of the rollout environment; its place in images.
    rollout_python: Path = Path("/opt/rollout/bin/python")
    # Without it everyone who knows the job's UID would know the key.
    secret: SecretStr = SecretStr("")

    @model_validator(mode="after")
    def _is_one_of_the_gang(self) -> Self:
        spares = len(self.spare_hosts)
        if self.index >= self.nodes + spares:
            spares_text = f", and {Environment.SPARE_HOSTS} names {spares}" if spares else ""
            raise ValueError(
                f"{Environment.INDEX} is {self.index}, but {Environment.NODES} is {self.nodes}{spares_text}"
            )
        return self

    @model_validator(mode="after")
    def _require_secret_if_reachable(self) -> Self:
        require_secret(self.secret.get_secret_value(), self.host)
        return self

    @model_validator(mode="after")
    def _can_start_its_engines(self) -> Self:
        if colocated_per_pod(self.spec, self.ranks_per_node) and not os.access(self.rollout_python, os.X_OK):
            raise ValueError(
                f"engines share the pods of this job, and {self.rollout_python} is no program; give resources.image an "
                f"image with both environments, as trainer-colocated is, or set {Environment.ROLLOUT_PYTHON}"
            )
        return self

    def with_place(self, place: int) -> TrainerPod:
        """Return the pod with the ranks of a place that it has taken."""
        return self.model_copy(update={"index": place})

    @property
    def is_first(self) -> bool:
        """True for the pod of rank 0."""
        return self.index == 0

    @property
    def first_rank(self) -> int:
        """The lowest global rank of this pod: ranks are numbered pod by pod."""
        return self.index * self.ranks_per_node

    @property
    def world_size(self) -> int:
        """All ranks of the job."""
        return self.nodes * self.ranks_per_node

    @property
    def launcher_key(self) -> bytes:
        """The key that the launchers of this attempt share."""
        return attempt_key(self.secret.get_secret_value(), self.uid, self.attempt)

    @property
    def fence(self) -> Fence:
        """The claims of this job on its run folder."""
        return Fence(self.run_folder, claim_key(self.secret.get_secret_value(), self.uid))

    @property
    def listens_on(self) -> str:
        """The address to serve on: a run on one machine is not reachable from others."""
        return self.host if is_loopback(self.host) else ""

"""The contract's environment as a frozen model: the operator (or `moejob run`) sets it for a launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from moejob_api.addresses import is_loopback
from moejob_api.contract import Environment, Role
from moejob_api.engines import colocated_per_pod
from moejob_api.job import Spec
from moejob_api.pod_environment import read_spec
from moejob_trainer.runtime.channel import attempt_key
from moejob_trainer.runtime.fencing import Fence, claim_key

_Name = Annotated[str, Field(min_length=1)]
_Port = Annotated[int, Field(ge=1, le=65_535)]
_Count = Annotated[int, Field(ge=1, le=65_536)]


class BadEnvironment(ValueError):
    """The environment contradicts the contract; a retry would find the same."""


class TrainerPod(BaseModel):
    """One trainer pod. Each field is the variable of its name in the contract."""

    model_config = ConfigDict(frozen=True)

    job: _Name
    namespace: str
    uid: _Name
    spec: Spec
    role: Literal[Role.TRAINER]
    attempt: Annotated[int, Field(ge=0)]
    index: Annotated[int, Field(ge=0)]
    nodes: _Count
    ranks_per_node: _Count
    rendezvous_host: _Name
    rendezvous_port: _Port
    host: _Name
    run_folder: Path
    grace_seconds: Annotated[int, Field(ge=1)]
    progress_port: _Port
    # Python of the rollout environment; its place in images.
    rollout_python: Path = Path("/opt/rollout/bin/python")
    # Without it everyone who knows the job's UID would know the key.
    secret: SecretStr = SecretStr("")

    @field_validator("spec", mode="before")
    @classmethod
    def _read(cls, text: object) -> object:
        return read_spec(text) if isinstance(text, str) else text

    @model_validator(mode="after")
    def _is_one_of_the_gang(self) -> Self:
        if self.index >= self.nodes:
            raise ValueError(f"{Environment.INDEX} is {self.index}, but {Environment.NODES} is {self.nodes}")
        return self

    @model_validator(mode="after")
    def _has_a_secret_where_others_reach_it(self) -> Self:
        if not self.secret.get_secret_value() and not is_loopback(self.host):
            raise ValueError(
                f"{Environment.SECRET} is not set, and {self.host} can be reached by others: let an operator of this "
                "version create the pod"
            )
        return self

    @model_validator(mode="after")
    def _can_start_its_engines(self) -> Self:
        if colocated_per_pod(self.spec, self.ranks_per_node) and not os.access(self.rollout_python, os.X_OK):
            raise ValueError(
                f"engines share the pods of this job, and {self.rollout_python} is no program; give resources.image an "
                f"image with both environments, as trainer-colocated is, or set {Environment.ROLLOUT_PYTHON}"
            )
        return self

    @property
    def is_first(self) -> bool:
        """True for the pod that hosts the rendezvous."""
        return self.index == 0

    @property
    def first_rank(self) -> int:
        """The lowest global rank of this pod: ranks are numbered pod by pod."""
        return self.index * self.ranks_per_node

    @property
    def world(self) -> int:
        """All ranks of the job."""
        return self.nodes * self.ranks_per_node

    @property
    def key(self) -> bytes:
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


def pod_of(environ: Mapping[str, str]) -> TrainerPod:
    """The pod that the environment describes; BadEnvironment names every variable that is wrong."""
    given = {name.name.lower(): environ[name] for name in Environment if environ.get(name) is not None}
    try:
        return TrainerPod.model_validate(given)
    except ValidationError as error:
        raise BadEnvironment("; ".join(_message(found["loc"], found["msg"]) for found in error.errors())) from None


def _message(place: tuple[int | str, ...], message: str) -> str:
    text = message.removeprefix("Value error, ")
    name = Environment.__members__.get(str(place[0]).upper()) if place else None
    if name is None:
        return text
    return f"{name} is not set" if message == "Field required" else f"{name}: {text}"

"""What the operator (or `moejob run`) says to a launcher: the contract's environment as a frozen model."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from moejob_api.contract import Environment, Role
from moejob_api.documents.reading import parse_job
from moejob_api.job import GROUP, KIND, VERSION, Spec

_Name = Annotated[str, Field(min_length=1)]
_Port = Annotated[int, Field(ge=1, le=65_535)]
_Count = Annotated[int, Field(ge=1, le=65_536)]


class BadEnvironment(ValueError):
    """The environment is not what the contract says; a retry would find the same."""


class Pod(BaseModel):
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

    @field_validator("spec", mode="before")
    @classmethod
    def _read(cls, text: object) -> object:
        if not isinstance(text, str):
            return text
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise ValueError(f"is not JSON: {error}") from None
        frame = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": {"name": "job"}}
        return parse_job({**frame, "spec": raw}).spec

    @model_validator(mode="after")
    def _is_one_of_the_gang(self) -> Self:
        if self.index >= self.nodes:
            raise ValueError(f"{Environment.INDEX} is {self.index}, but {Environment.NODES} is {self.nodes}")
        return self

    @property
    def is_first(self) -> bool:
        """Whether this pod hosts the rendezvous."""
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
    def listens_on(self) -> str:
        """The address to serve on: a run on one machine is nobody else's business."""
        return self.host if _is_loopback(self.host) else ""


def pod_of(environ: Mapping[str, str]) -> Pod:
    """The pod that the environment describes; BadEnvironment names every variable that is wrong."""
    given = {name.name.lower(): environ[name] for name in Environment if environ.get(name) is not None}
    try:
        return Pod.model_validate(given)
    except ValidationError as error:
        raise BadEnvironment("; ".join(_said(found["loc"], found["msg"]) for found in error.errors())) from None


def _said(place: tuple[int | str, ...], message: str) -> str:
    text = message.removeprefix("Value error, ")
    name = Environment.__members__.get(str(place[0]).upper()) if place else None
    if name is None:
        return text
    return f"{name} is not set" if message == "Field required" else f"{name}: {text}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

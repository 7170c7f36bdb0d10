"""The contract's environment of one pod: the operator and `moejob run` write it, launchers and engines read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ValidationError

from moejob_api.contract.addresses import is_loopback
from moejob_api.contract.pods import Environment, Role
from moejob_api.documents.reading import parse_spec
from moejob_api.job import Spec

# The kernel refuses to start a program with a longer one.
LONGEST_VALUE_BYTES = 128 * 1024 - 256

Pod = TypeVar("Pod", bound=BaseModel)


class BadEnvironment(ValueError):
    """The environment contradicts the contract; another start would find the same."""


@dataclass(frozen=True, slots=True)
class Address:
    """The addresses of a pod: its own host, pod 0's, and the ports that all pods of the gang share."""

    host: str
    rendezvous_host: str
    rendezvous_port: int
    progress_port: int


@dataclass(frozen=True, slots=True)
class PodOrders:
    """The environment of one pod. `namespace`, `job` and `uid` name the job, `index` the pod among `nodes`."""

    job: str
    namespace: str
    uid: str
    spec: Spec
    role: Role
    attempt: int
    index: int
    nodes: int
    ranks: int
    address: Address
    run_folder: str
    grace_seconds: int
    # None where the pod reads it from a Secret.
    secret: str | None = field(default=None, repr=False)


def contract_environment(orders: PodOrders) -> dict[Environment, str]:
    """The variables of a pod."""
    known = {} if orders.secret is None else {Environment.SECRET: orders.secret}
    return known | {
        Environment.JOB: orders.job,
        Environment.NAMESPACE: orders.namespace,
        Environment.UID: orders.uid,
        Environment.SPEC: spec_text(orders.spec),
        Environment.ROLE: orders.role.value,
        Environment.ATTEMPT: str(orders.attempt),
        Environment.INDEX: str(orders.index),
        Environment.NODES: str(orders.nodes),
        Environment.RANKS_PER_NODE: str(orders.ranks),
        Environment.RENDEZVOUS_HOST: orders.address.rendezvous_host,
        Environment.HOST: orders.address.host,
        Environment.RUN_FOLDER: orders.run_folder,
        Environment.GRACE_SECONDS: str(orders.grace_seconds),
        Environment.PROGRESS_PORT: str(orders.address.progress_port),
        Environment.RENDEZVOUS_PORT: str(orders.address.rendezvous_port),
    }


def spec_text(spec: Spec) -> str:
    """The spec as JSON with all defaults. What only the pod itself is made of stays outside: it may hold secrets."""
    pod = spec.resources.model_copy(update={"env": (), "env_from": (), "labels": {}, "annotations": {}})
    return spec.model_copy(update={"resources": pod}).model_dump_json(by_alias=True, exclude_none=True)


def read_spec(text: str) -> Spec:
    """Return the spec that `spec_text` wrote; ValueError says what is wrong with it."""
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    return parse_spec(raw)


def from_environment(kind: type[Pod], environ: Mapping[str, str]) -> Pod:
    """Return the pod that the environment describes; BadEnvironment names every variable that is wrong."""
    given = {name.name.lower(): environ[name] for name in Environment if environ.get(name) is not None}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise BadEnvironment("; ".join(_problem(found["loc"], found["msg"]) for found in error.errors())) from None


def require_secret(secret: str | None, host: str) -> None:
    """Raise ValueError where a pod without the job's secret can be reached by others."""
    if not secret and not is_loopback(host):
        raise ValueError(
            f"{Environment.SECRET} is not set, and {host} can be reached by others: let an operator of this version "
            "create the pod"
        )


def _problem(place: tuple[int | str, ...], message: str) -> str:
    text = message.removeprefix("Value error, ")
    name = Environment.__members__.get(str(place[0]).upper()) if place else None
    if name is None:
        return text
    return f"{name} is not set" if message == "Field required" else f"{name}: {text}"


def _read(given: object) -> object:
    return read_spec(given) if isinstance(given, str) else given


# A spec as `spec_text` writes it.
WrittenSpec = Annotated[Spec, BeforeValidator(_read)]

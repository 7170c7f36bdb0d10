"""The contract's environment of one pod: the operator and `moejob run` write it, launchers and engines read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ValidationError

from moejob_api.contract.addresses import is_loopback
from moejob_api.contract.pods import Environment, PodRole
from moejob_api.documents.reading import parse_spec
from moejob_api.job import Spec

# The kernel refuses to start a program with a longer value.
LONGEST_VALUE_BYTES = 128 * 1024 - 256

Pod = TypeVar("Pod", bound=BaseModel)


class BadEnvironment(ValueError):
    """The environment contradicts the contract; every later start would fail the same way."""


@dataclass(frozen=True, slots=True)
class PodAddresses:
    """The addresses of a pod: its own host, pod 0's, and the ports that all pods of the gang share."""

    host: str
    rendezvous_host: str
    rendezvous_port: int
    progress_port: int
    # The host of rank 0, and a port that is free there.
    master_host: str
    master_port: int


@dataclass(frozen=True, slots=True)
class PodContract:
    """The environment of one pod. `namespace`, `job` and `uid` name the job, `index` the pod among `nodes`."""

    job: str
    namespace: str
    uid: str
    spec: Spec
    role: PodRole
    attempt: int
    index: int
    nodes: int
    ranks: int
    address: PodAddresses
    run_folder: str
    grace_seconds: int
    # Of further trainer pods, whose index is `nodes` and above.
    spare_hosts: tuple[str, ...] = ()
    # None where the pod reads it from a Secret.
    secret: str | None = field(default=None, repr=False)


def contract_environment(contract: PodContract) -> dict[Environment, str]:
    """The variables of a pod."""
    secret_variable = {} if contract.secret is None else {Environment.SECRET: contract.secret}
    spare_variable = {Environment.SPARE_HOSTS: ",".join(contract.spare_hosts)} if contract.spare_hosts else {}
    return (
        secret_variable
        | spare_variable
        | {
            Environment.JOB: contract.job,
            Environment.NAMESPACE: contract.namespace,
            Environment.UID: contract.uid,
            Environment.SPEC: spec_text(contract.spec),
            Environment.ROLE: contract.role.value,
            Environment.ATTEMPT: str(contract.attempt),
            Environment.INDEX: str(contract.index),
            Environment.NODES: str(contract.nodes),
            Environment.RANKS_PER_NODE: str(contract.ranks),
            Environment.RENDEZVOUS_HOST: contract.address.rendezvous_host,
            Environment.HOST: contract.address.host,
            Environment.RUN_FOLDER: contract.run_folder,
            Environment.GRACE_SECONDS: str(contract.grace_seconds),
            Environment.PROGRESS_PORT: str(contract.address.progress_port),
            Environment.RENDEZVOUS_PORT: str(contract.address.rendezvous_port),
        }
    )


def spec_text(spec: Spec) -> str:
    """The spec as JSON with all defaults, without fields that only the pod is made of: these may hold secrets."""
    pod = spec.resources.model_copy(update={"env": (), "env_from": (), "labels": {}, "annotations": {}})
    return spec.model_copy(update={"resources": pod, "pod_template": None}).model_dump_json(
        by_alias=True, exclude_none=True
    )


def read_spec(text: str) -> Spec:
    """Return the spec that `spec_text` wrote; ValueError explains a faulty text."""
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    return parse_spec(raw)


def read_environment(kind: type[Pod], environ: Mapping[str, str]) -> Pod:
    """Return the pod that the environment describes; BadEnvironment names every variable that is wrong."""
    values = {name.name.lower(): environ[name] for name in Environment if environ.get(name) is not None}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise BadEnvironment(
            "; ".join(_variable_problem(detail["loc"], detail["msg"]) for detail in error.errors())
        ) from None


def split_hosts(hosts: object) -> object:
    """Return the host names of a variable that has them comma separated."""
    return tuple(filter(None, hosts.split(","))) if isinstance(hosts, str) else hosts


def require_secret(secret: str | None, host: str) -> None:
    """Raise ValueError if other machines can reach a pod that has no secret."""
    if not secret and not is_loopback(host):
        raise ValueError(
            f"{Environment.SECRET} is not set, and {host} can be reached by others: let an operator of this version "
            "create the pod"
        )


def _variable_problem(place: tuple[int | str, ...], message: str) -> str:
    text = message.removeprefix("Value error, ")
    name = Environment.__members__.get(str(place[0]).upper()) if place else None
    if name is None:
        return text
    return f"{name} is not set" if message == "Field required" else f"{name}: {text}"


def _parse_if_text(value: object) -> object:
    return read_spec(value) if isinstance(value, str) else value


# A spec as `spec_text` writes it.
WrittenSpec = Annotated[Spec, BeforeValidator(_parse_if_text)]

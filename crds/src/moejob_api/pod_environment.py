"""The contract's environment of one pod as text: what the operator and `moejob run` both give to a launcher. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from moejob_api.contract import Environment, Role
from moejob_api.documents.reading import parse_spec
from moejob_api.job import Spec

# The kernel refuses to start a program with a longer one.
LONGEST_VALUE_BYTES = 128 * 1024 - 256


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

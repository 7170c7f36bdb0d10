"""The environment of a pod: the contract's variables and the job's own, nothing else."""

from __future__ import annotations

from typing import Any

from moejob_api.contract.engines import colocated_per_pod, engine_urls
from moejob_api.contract.pod_environment import Address, PodOrders, contract_environment
from moejob_api.contract.pods import Environment, Port, Role
from moejob_api.job import Spec
from moejob_api.job.resources import EnvSource, EnvVar, KeyReference
from moejob_operator.children.attempt import Attempt
from moejob_operator.children.shared import SECRET_KEY


def environment(attempt: Attempt, role: Role, index: int) -> list[dict[str, Any]]:
    """Variables of one pod. The job's come first: the contract's win over them and can refer to none of them."""
    contract = _contract(attempt, role, index)
    return [
        *(_variable(given) for given in attempt.spec.resources.env),
        *({"name": name.value, "value": value} for name, value in contract.items()),
        {
            "name": Environment.SECRET.value,
            "valueFrom": {"secretKeyRef": {"name": attempt.access, "key": SECRET_KEY}},
        },
    ]


def environment_sources(spec: Spec) -> list[dict[str, Any]]:
    """Secrets and ConfigMaps of which every key becomes a variable."""
    return [_source(given) for given in spec.resources.env_from]


def _contract(attempt: Attempt, role: Role, index: int) -> dict[Environment, str]:
    orders = PodOrders(
        job=attempt.name,
        namespace=attempt.namespace,
        uid=attempt.uid,
        spec=attempt.spec,
        role=role,
        attempt=attempt.number_of(role),
        index=index,
        nodes=attempt.layout.nodes if role is Role.TRAINER else attempt.engines,
        ranks=ranks_per_pod(attempt, role),
        address=Address(
            host=attempt.host(role, index),
            rendezvous_host=attempt.host(Role.TRAINER, 0),
            rendezvous_port=Port.RENDEZVOUS,
            progress_port=Port.PROGRESS,
        ),
        run_folder=f"{attempt.spec.storage.mount_path.rstrip('/')}/{attempt.name}",
        grace_seconds=attempt.grace_seconds(role),
    )
    said = contract_environment(orders)
    # Kubernetes would expand $(NAME) in a value; a chat template may well hold one.
    return said | {Environment.SPEC: said[Environment.SPEC].replace("$", "$$")} | _engines(attempt)


def ranks_per_pod(attempt: Attempt, role: Role) -> int:
    """GPUs of a pod; on CPU, ranks."""
    if role is Role.ROLLOUT and attempt.rollout is not None:
        return attempt.rollout.tensor
    return attempt.layout.gpus_per_pod


def _engines(attempt: Attempt) -> dict[Environment, str]:
    colocated = colocated_per_pod(attempt.spec, attempt.layout.gpus_per_pod)
    urls = (
        engine_urls(attempt.hosts(Role.TRAINER), colocated, Port.ROLLOUT)
        if colocated
        else engine_urls(attempt.hosts(Role.ROLLOUT), 1, Port.ROLLOUT)
    )
    return {Environment.ROLLOUT_URLS: ",".join(urls)} if urls else {}


def _variable(given: EnvVar) -> dict[str, Any]:
    if given.secret is not None:
        return {"name": given.name, "valueFrom": {"secretKeyRef": _key(given.secret)}}
    if given.config_map is not None:
        return {"name": given.name, "valueFrom": {"configMapKeyRef": _key(given.config_map)}}
    return {"name": given.name, "value": given.value or ""}


def _key(reference: KeyReference) -> dict[str, Any]:
    return {
        "name": reference.name,
        "key": reference.key,
        **({"optional": True} if reference.optional else {}),
    }


def _source(given: EnvSource) -> dict[str, Any]:
    if given.secret is not None:
        return {"secretRef": {"name": given.secret}}
    return {"configMapRef": {"name": given.config_map}}

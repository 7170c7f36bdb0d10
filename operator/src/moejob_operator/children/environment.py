"""The environment of a pod: what the contract says, and what the job adds. Nothing else."""

from __future__ import annotations

from typing import Any

from moejob_api.contract import Environment, Port, Role
from moejob_api.engines import colocated_per_pod, engine_urls
from moejob_api.job import Spec
from moejob_api.job.resources import EnvSource, EnvVar, KeyReference
from moejob_api.pod_environment import Address, PodOrders, contract_environment
from moejob_operator.children.blueprint import Blueprint
from moejob_operator.children.shared import SECRET_KEY


def environment(blueprint: Blueprint, role: Role, index: int) -> list[dict[str, Any]]:
    """Variables of one pod: the job's own first, so that the contract's may refer to none of them and win over all."""
    contract = _contract(blueprint, role, index)
    return [
        *(_variable(given) for given in blueprint.spec.resources.env),
        *({"name": name.value, "value": value} for name, value in contract.items()),
        {
            "name": Environment.SECRET.value,
            "valueFrom": {"secretKeyRef": {"name": blueprint.access, "key": SECRET_KEY}},
        },
    ]


def environment_sources(spec: Spec) -> list[dict[str, Any]]:
    """Secrets and ConfigMaps read whole."""
    return [_source(given) for given in spec.resources.env_from]


def _contract(blueprint: Blueprint, role: Role, index: int) -> dict[Environment, str]:
    orders = PodOrders(
        job=blueprint.name,
        namespace=blueprint.namespace,
        uid=blueprint.uid,
        spec=blueprint.spec,
        role=role,
        attempt=blueprint.attempt_of(role),
        index=index,
        nodes=blueprint.layout.nodes if role is Role.TRAINER else blueprint.engines,
        ranks=ranks_per_pod(blueprint, role),
        address=Address(
            host=blueprint.host(role, index),
            rendezvous_host=blueprint.host(Role.TRAINER, 0),
            rendezvous_port=Port.RENDEZVOUS,
            progress_port=Port.PROGRESS,
        ),
        run_folder=f"{blueprint.spec.storage.mount_path.rstrip('/')}/{blueprint.name}",
        grace_seconds=blueprint.grace_seconds(role),
    )
    said = contract_environment(orders)
    # Kubernetes would expand $(NAME) in a value; a chat template may well hold one.
    return said | {Environment.SPEC: said[Environment.SPEC].replace("$", "$$")} | _engines(blueprint)


def ranks_per_pod(blueprint: Blueprint, role: Role) -> int:
    """GPUs of a pod; on CPU, ranks."""
    if role is Role.ROLLOUT and blueprint.rollout is not None:
        return blueprint.rollout.tensor
    return blueprint.layout.gpus_per_pod


def _engines(blueprint: Blueprint) -> dict[Environment, str]:
    colocated = colocated_per_pod(blueprint.spec, blueprint.layout.gpus_per_pod)
    urls = (
        engine_urls(blueprint.hosts(Role.TRAINER), colocated, Port.ROLLOUT)
        if colocated
        else engine_urls(blueprint.hosts(Role.ROLLOUT), 1, Port.ROLLOUT)
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

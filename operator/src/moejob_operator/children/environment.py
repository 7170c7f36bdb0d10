"""The environment of a pod: the contract's variables and the job's own, nothing else."""

from __future__ import annotations

from typing import Any

from moejob_api.contract.engines import colocated_per_pod, engine_urls
from moejob_api.contract.pod_environment import PodAddresses, PodContract, contract_environment
from moejob_api.contract.pods import Environment, PodPort, PodRole
from moejob_api.contract.torchrun import torchrun_environment
from moejob_api.job import Spec
from moejob_api.job.resources import EnvSource, EnvVar, KeyReference
from moejob_operator.children.attempt import Attempt
from moejob_operator.children.shared import SECRET_KEY


def environment_variables(attempt: Attempt, role: PodRole, index: int) -> list[dict[str, Any]]:
    """Variables of one pod. The job's come first, so that the contract's override them and cannot refer to them."""
    contract = _pod_contract(attempt, role, index)
    torchrun = torchrun_environment(contract) if role is PodRole.TRAINER else {}
    return [
        *(_job_variable(variable) for variable in attempt.spec.resources.env),
        *({"name": name, "value": value} for name, value in torchrun.items()),
        *({"name": name.value, "value": value} for name, value in _contract_variables(attempt, contract).items()),
        # The scheduler chooses the node after the manifest is made.
        {"name": Environment.NODE.value, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {
            "name": Environment.SECRET.value,
            "valueFrom": {"secretKeyRef": {"name": attempt.access_name, "key": SECRET_KEY}},
        },
    ]


def environment_sources(spec: Spec) -> list[dict[str, Any]]:
    """Secrets and ConfigMaps of which every key becomes a variable."""
    return [_environment_source(source) for source in spec.resources.env_from]


def _pod_contract(attempt: Attempt, role: PodRole, index: int) -> PodContract:
    return PodContract(
        job=attempt.name,
        namespace=attempt.namespace,
        uid=attempt.uid,
        spec=attempt.spec,
        role=role,
        attempt=attempt.attempt_number(role),
        index=index,
        nodes=attempt.layout.nodes if role is PodRole.TRAINER else attempt.engine_count,
        ranks=ranks_per_pod(attempt, role),
        address=PodAddresses(
            host=attempt.host_name(role, index),
            rendezvous_host=attempt.host_name(PodRole.TRAINER, 0),
            rendezvous_port=PodPort.RENDEZVOUS,
            progress_port=PodPort.PROGRESS,
            master_host=attempt.host_name(PodRole.TRAINER, 0),
            master_port=PodPort.RANKS,
        ),
        run_folder=f"{attempt.spec.storage.mount_path.rstrip('/')}/{attempt.name}",
        grace_seconds=attempt.grace_seconds(role),
        spare_hosts=tuple(attempt.spare_hosts()) if role is PodRole.TRAINER else (),
    )


def _contract_variables(attempt: Attempt, contract: PodContract) -> dict[Environment, str]:
    variables = contract_environment(contract)
    # Kubernetes would expand $(NAME) in a value; a chat template may well hold one.
    return variables | {Environment.SPEC: variables[Environment.SPEC].replace("$", "$$")} | _engine_variables(attempt)


def ranks_per_pod(attempt: Attempt, role: PodRole) -> int:
    """GPUs of a pod; on CPU, ranks."""
    if role is PodRole.ROLLOUT and attempt.rollout is not None:
        return attempt.rollout.tensor
    return attempt.layout.gpus_per_pod


def _engine_variables(attempt: Attempt) -> dict[Environment, str]:
    engines_per_pod = colocated_per_pod(attempt.spec, attempt.layout.gpus_per_pod)
    urls = (
        engine_urls(attempt.host_names(PodRole.TRAINER), engines_per_pod, PodPort.ROLLOUT)
        if engines_per_pod
        else engine_urls(attempt.host_names(PodRole.ROLLOUT), 1, PodPort.ROLLOUT)
    )
    return {Environment.ROLLOUT_URLS: ",".join(urls)} if urls else {}


def _job_variable(variable: EnvVar) -> dict[str, Any]:
    if variable.secret is not None:
        return {"name": variable.name, "valueFrom": {"secretKeyRef": _key_reference(variable.secret)}}
    if variable.config_map is not None:
        return {"name": variable.name, "valueFrom": {"configMapKeyRef": _key_reference(variable.config_map)}}
    return {"name": variable.name, "value": variable.value or ""}


def _key_reference(reference: KeyReference) -> dict[str, Any]:
    return {
        "name": reference.name,
        "key": reference.key,
        **({"optional": True} if reference.optional else {}),
    }


def _environment_source(source: EnvSource) -> dict[str, Any]:
    if source.secret is not None:
        return {"secretRef": {"name": source.secret}}
    return {"configMapRef": {"name": source.config_map}}

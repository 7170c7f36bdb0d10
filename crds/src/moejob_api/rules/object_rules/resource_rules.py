"""Hosts, environment, pod templates, queues and spares."""

from __future__ import annotations

from moejob_api.contract.torchrun import TORCHRUN_VARIABLES
from moejob_api.job import Spec
from moejob_api.job.grpo import (
    RolloutPlacement,
)
from moejob_api.job.lifecycle import GangScheduler
from moejob_api.job.resources import Accelerator, GpuType, TolerationOperator
from moejob_api.layout.sizes import count_gpus
from moejob_api.pod_template.checks import template_complaints
from moejob_api.pod_template.in_cel import template_fields_cel
from moejob_api.problems import Rule
from moejob_api.rules.object_rules.object_rule import ON_GPU, Complaint, ObjectRule, with_gpus


def _one_gpu_memory(spec: Spec) -> Complaint:
    resources = spec.resources
    if resources.gpu_type is None or resources.gpu_memory_gi_b is None:
        return None
    return (
        f"gpuType {resources.gpu_type} and gpuMemoryGiB {resources.gpu_memory_gi_b} both say how much memory a GPU "
        "has; keep one"
    )


def _gpu_beside_arm(spec: Spec) -> Complaint:
    if spec.resources.gpu_type is not GpuType.GB200:
        return None
    return (
        "GB200 stands beside Arm CPUs, for which there are no images of moejob; take another gpuType, or build images "
        "of your own and set gpuMemoryGiB: 184 with image and rolloutImage"
    )


def _cpu_without_gpu_settings(spec: Spec) -> Complaint:
    resources = spec.resources
    if resources.accelerator is Accelerator.GPU:
        return None
    if resources.gpu_type is None and resources.gpu_memory_gi_b is None and resources.rdma is None:
        return None
    return "accelerator CPU has no GPUs; remove gpuType, gpuMemoryGiB and rdma, or set accelerator: GPU"


def _one_value_per_variable(spec: Spec) -> Complaint:
    names: set[str] = set()
    for variable in spec.resources.env:
        values = [v for v in (variable.value, variable.secret, variable.config_map) if v is not None]
        if len(values) != 1:
            return f"variable {variable.name} needs exactly one of value, secret and configMap, {len(values)} are given"
        if variable.name.startswith("MOEJOB_"):
            return f"variable {variable.name} is set by moejob itself; choose another name"
        if variable.name in TORCHRUN_VARIABLES:
            return f"variable {variable.name} is torchrun's, and moejob sets it from the layout; remove it"
        # The API server says this of itself: the list is keyed by name.
        if variable.name in names:
            return f"variable {variable.name} is given twice; keep one"
        names.add(variable.name)
    return None


def _one_source_per_import(spec: Spec) -> Complaint:
    for index, source in enumerate(spec.resources.env_from):
        if (source.secret is None) == (source.config_map is None):
            return f"entry {index} needs exactly one of secret and configMap"
    return None


def _toleration_values(spec: Spec) -> Complaint:
    for index, toleration in enumerate(spec.resources.tolerations):
        if toleration.operator is TolerationOperator.EXISTS and toleration.value is not None:
            return f"toleration {index} has operator Exists and a value; remove one"
        if toleration.operator is TolerationOperator.EQUAL and toleration.key is None:
            return f"toleration {index} has no key; add one or use operator Exists"
    return None


def _sound_templates(spec: Spec) -> Complaint:
    return next(template_complaints(spec), None)


def _queue_of_gang(spec: Spec) -> Complaint:
    gang, queue = spec.lifecycle.gang, spec.lifecycle.queue
    if gang is GangScheduler.KUEUE and queue is None:
        return "gang Kueue needs the name of its LocalQueue; set queue"
    if queue is not None and gang not in (GangScheduler.AUTO, GangScheduler.KUEUE, GangScheduler.VOLCANO):
        return f"gang {gang} has no queues; remove queue {queue!r} or use Kueue or Volcano"
    return None


def _places_for_spares(spec: Spec) -> Complaint:
    resources, lifecycle = spec.resources, spec.lifecycle
    if resources.spares == 0:
        return None
    if count_gpus(spec.parallelism) <= resources.gpus_per_node:
        return (
            "spares stand in for lost pods beside pods that go on, and this job has a single pod, which holds the "
            "rendezvous; remove spares, or train on more nodes"
        )
    if spec.grpo is not None and spec.grpo.rollout.placement is RolloutPlacement.COLOCATED:
        return "engines of placement Colocated have the addresses of their pods, which spares lack; use Separate"
    if lifecycle.gang is GangScheduler.KUEUE or (lifecycle.queue is not None and lifecycle.gang is GangScheduler.AUTO):
        return "Kueue replaces whole groups of pods only, so a spare would idle; use gang Volcano, or no queue"
    if resources.topology_key is not None:
        return "a spare may be outside the domain of topologyKey that the lost pod was in; remove one of the two"
    return None


RESOURCE_RULES: tuple[ObjectRule, ...] = (
    ObjectRule(
        Rule.EXACTLY_ONE,
        "spec.resources",
        _one_gpu_memory,
        "!(has(self.gpuType) && has(self.gpuMemoryGiB))",
        "at most one of gpuType and gpuMemoryGiB is given",
        on="spec.resources",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.resources.gpuType",
        _gpu_beside_arm,
        "!has(self.gpuType) || self.gpuType != 'GB200'",
        "GB200 stands beside Arm CPUs, for which there are no images",
        on="spec.resources",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.resources.accelerator",
        _cpu_without_gpu_settings,
        f"{ON_GPU} || [self.resources].all(r, !(has(r.gpuType) || has(r.gpuMemoryGiB) || has(r.rdma)))",
        "accelerator CPU has no gpuType, gpuMemoryGiB or rdma",
    ),
    ObjectRule(
        Rule.ENVIRONMENT,
        "spec.resources.env",
        _one_value_per_variable,
        "self.resources.env.all(e, !e.name.startsWith('MOEJOB_') && "
        f"!(e.name in {list(map(str, TORCHRUN_VARIABLES))}) && "
        "(has(e.value) ? 1 : 0) + (has(e.secret) ? 1 : 0) + (has(e.configMap) ? 1 : 0) == 1)",
        "every variable has exactly one of value, secret and configMap, and a name that neither starts with MOEJOB_ "
        "nor is one of torchrun's",
    ),
    ObjectRule(
        Rule.ENVIRONMENT,
        "spec.resources.envFrom",
        _one_source_per_import,
        "self.resources.envFrom.all(e, has(e.secret) != has(e.configMap))",
        "every entry has exactly one of secret and configMap",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.resources.tolerations",
        _toleration_values,
        "self.resources.tolerations.all(t, t.operator == 'Exists' ? !has(t.value) : has(t.key))",
        "a toleration with Exists has no value, one with Equal has a key",
    ),
    ObjectRule(
        Rule.POD_TEMPLATE,
        "spec.podTemplate",
        _sound_templates,
        template_fields_cel(),
        "podTemplate has fields that a template cannot set, or is for pods that the job does not have; "
        "`moejob validate` names them",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.lifecycle.queue",
        _queue_of_gang,
        "[self.lifecycle].all(l, (has(l.queue) || l.gang != 'Kueue') && (!has(l.queue) || l.gang in ['Auto', "
        "'Kueue', 'Volcano']))",
        "gang Kueue needs a queue; only Auto, Kueue and Volcano take one",
        profile_may_heal=True,
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.resources.spares",
        _places_for_spares,
        "!has(self.resources.spares) || self.resources.spares == 0 || ("
        + with_gpus("n > self.resources.gpusPerNode")
        + " && (!has(self.grpo) || self.grpo.rollout.placement != 'Colocated') && self.lifecycle.gang != 'Kueue' && "
        "(!has(self.lifecycle.queue) || self.lifecycle.gang != 'Auto') && !has(self.resources.topologyKey))",
        "spares need several trainer pods, and neither Colocated engines, Kueue nor topologyKey",
        profile_may_heal=True,
    ),
)

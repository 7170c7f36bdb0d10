"""Fields of an accepted job that do nothing beside its others: each is a warning that names it.

A value that is the field's default counts as not given, for the API server writes defaults into every job.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from moejob_api.derived import balancing_method, has_overlapped_gradient_reduction
from moejob_api.job import Method, Spec
from moejob_api.job.evaluations import prompt_sets
from moejob_api.job.grpo import BuiltInReward, Grpo, PolicyLoss, Reward
from moejob_api.job.model import DataFormat, Dataset, is_place
from moejob_api.job.moe import BalancingMethod
from moejob_api.job.resources import Accelerator
from moejob_api.job.training import EvalAnswers, SchedulerKind
from moejob_api.models.shape import ModelShape
from moejob_api.problems import Problem, Rule


def idle_fields(spec: Spec, shape: ModelShape | None) -> Iterator[Problem]:
    """Every field that was given and that nothing will read."""
    yield from _idle_expert_fields(spec, shape)
    yield from _idle_schedule_fields(spec)
    yield from _idle_evaluation_fields(spec)
    yield from _idle_data_fields(spec)
    yield from _idle_answer_fields(spec)
    yield from _idle_source_fields(spec)
    yield from _idle_layout_fields(spec)
    yield from _idle_communication_fields(spec)
    yield from _idle_mtp_fields(spec, shape)
    if spec.grpo is not None:
        yield from _idle_policy_fields(spec, spec.grpo)
        for index, reward in enumerate(spec.grpo.rewards):
            yield from _idle_reward_fields(f"grpo.rewards[{index}]", reward)


def _idle_expert_fields(spec: Spec, shape: ModelShape | None) -> Iterator[Problem]:
    if shape is not None and shape.experts is None:
        for name in type(spec.moe).model_fields:
            if _is_given(spec.moe, name):
                yield _idle_problem(f"moe.{to_camel(name)}", f"{shape.family} has no experts")
        return
    kind = balancing_method(spec)
    if kind in (BalancingMethod.NONE, BalancingMethod.EXPERT_BIAS) and _is_given(spec.moe, "aux_loss_coefficient"):
        advice = "; ExpertBias takes seqAuxLossCoefficient" if kind is BalancingMethod.EXPERT_BIAS else ""
        yield _idle_problem("moe.auxLossCoefficient", f"balancing {kind} has no such loss{advice}")
    if kind is BalancingMethod.EXPERT_BIAS:
        return
    if _is_given(spec.moe, "expert_bias_update_rate"):
        yield _idle_problem("moe.expertBiasUpdateRate", f"balancing {kind} moves no bias")
    if _is_given(spec.moe, "seq_aux_loss_coefficient"):
        yield _idle_problem(
            "moe.seqAuxLossCoefficient", f"balancing {kind} has one loss; auxLossCoefficient is its weight"
        )


def _idle_schedule_fields(spec: Spec) -> Iterator[Problem]:
    scheduler, path = spec.training.scheduler, "training.scheduler"
    if scheduler.kind is SchedulerKind.CONSTANT:
        for name in ("decay_steps", "minimum_learning_rate"):
            if _is_given(scheduler, name):
                yield _idle_problem(f"{path}.{to_camel(name)}", "kind Constant does not decay")
        return
    steps = spec.training.max_steps
    if (
        steps is not None
        and scheduler.decay_steps is not None
        and scheduler.warmup_steps + scheduler.decay_steps > steps
    ):
        yield Problem(
            Rule.IDLE,
            f"spec.{path}.decaySteps",
            f"decaySteps {scheduler.decay_steps} after warmupSteps {scheduler.warmup_steps} is more than maxSteps "
            f"{steps}: the decay never ends; lower it to {max(1, steps - scheduler.warmup_steps)}",
        )


def _idle_evaluation_fields(spec: Spec) -> Iterator[Problem]:
    if spec.checkpoint.keep_best is not None and spec.training.eval_every is None:
        yield _idle_problem(
            "checkpoint.keepBest", "without training.evalEvery the last step alone is evaluated, and kept"
        )

    stop, every, steps = spec.training.early_stop, spec.training.eval_every, spec.training.max_steps
    if stop is None or every is None or steps is None:
        return
    # The first evaluation is what the next are compared with.
    first = every * (stop.patience + 1)
    if first >= steps:
        yield _idle_problem(
            "training.earlyStop",
            f"patience {stop.patience} evaluations of evalEvery {every} steps end the run at step {first} at the "
            f"earliest, and it has {steps} steps",
        )


def _idle_data_fields(spec: Spec) -> Iterator[Problem]:
    for part, datasets in (("train", spec.data.train), ("eval", spec.data.eval)):
        for index, dataset in enumerate(datasets):
            if is_place(dataset.source):
                yield from _idle_place_fields(f"data.{part}[{index}]", dataset)
            if _is_given(dataset, "trained_turns") and dataset.format is not DataFormat.CHAT:
                yield _idle_problem(
                    f"data.{part}[{index}].trainedTurns", f"records of format {dataset.format} have no turns"
                )
    for index, dataset in enumerate(spec.data.eval):
        if _is_given(dataset, "weight"):
            yield _idle_problem(f"data.eval[{index}].weight", "every record of evaluation data counts once")
    formats = {dataset.format for dataset in (*spec.data.train, *spec.data.eval)}
    if spec.data.chat_template is not None and not formats & {DataFormat.CHAT, DataFormat.PROMPTS}:
        yield _idle_problem("data.chatTemplate", "no data set has format Chat or Prompts")


def _idle_answer_fields(spec: Spec) -> Iterator[Problem]:
    whys = (
        (spec.method is Method.GRPO, "GRPO answers as grpo.evaluation says"),
        (not prompt_sets(spec), "no set of data.eval has format Prompts"),
    )
    if why := next((why for is_so, why in whys if is_so), None):
        for name in EvalAnswers.model_fields:
            if _is_given(spec.training.eval_answers, name):
                yield _idle_problem(f"training.evalAnswers.{to_camel(name)}", why)


def _idle_place_fields(path: str, dataset: Dataset) -> Iterator[Problem]:
    what = f"{dataset.source} is a file or folder, which has no"
    for name, of_hub in (("split", "splits"), ("configuration", "configurations")):
        if _is_given(dataset, name):
            yield _idle_problem(f"{path}.{name}", f"{what} {of_hub}")
    if dataset.streaming:
        yield _idle_problem(
            f"{path}.streaming", f"{dataset.source} is a file or folder, which is read record by record anyway"
        )


def _idle_source_fields(spec: Spec) -> Iterator[Problem]:
    if spec.model.revision is not None and is_place(spec.model.config_source):
        yield _idle_problem("model.revision", f"{spec.model.config_source} is a folder, which has no revisions")
    if spec.method is Method.SFT and spec.resources.rollout_image is not None:
        yield _idle_problem("resources.rolloutImage", "method SFT generates no answers")
    if spec.resources.accelerator is Accelerator.CPU and _is_given(spec.resources, "gpu_resource"):
        yield _idle_problem("resources.gpuResource", "accelerator CPU takes no GPUs")
    if spec.storage.claim_name is not None:
        for name in ("storage_class", "access_modes", "reclaim"):
            if _is_given(spec.storage, name):
                yield _idle_problem(f"storage.{to_camel(name)}", f"claim {spec.storage.claim_name} exists already")


def _idle_layout_fields(spec: Spec) -> Iterator[Problem]:
    sizes = spec.parallelism
    if sizes.sequence and sizes.tensor == 1:
        yield _idle_problem("parallelism.sequence", "tensor 1 has no group to split the sequence over")
    if sizes.pipeline > 1:
        return
    for name in ("embedding_counts_as_layer", "loss_counts_as_layer"):
        if _is_given(sizes, name):
            yield _idle_problem(f"parallelism.{to_camel(name)}", "pipeline 1 has one stage, which takes all layers")


def _idle_communication_fields(spec: Spec) -> Iterator[Problem]:
    sharding = spec.memory.sharding
    of_shares = (
        sharding.has_weight_shards,
        f"{sharding} gathers weights and sums gradients beside the computation anyway",
    )
    cases = {
        "overlap_gradient_reduction": [of_shares],
        "overlap_parameter_gather": [
            of_shares,
            (spec.method is Method.GRPO, "GRPO publishes the weights of an update before it computes with them"),
            (
                not has_overlapped_gradient_reduction(spec),
                "without overlapGradientReduction all weights lie in one bucket, which the first layer needs",
            ),
        ],
        "overlap_optimizer_copies": [
            (spec.memory.offload_optimizer == 0, "memory.offloadOptimizer is 0, nothing is copied")
        ],
        "read_replicas": [
            (not sharding.has_weight_shards, f"with {sharding} every replica has all weights"),
            (spec.memory.offload_parameters, "memory.offloadParameters moves shares, which no replica may read then"),
        ],
    }
    for name, whys in cases.items():
        why = next((why for is_so, why in whys if is_so), None)
        if why is not None and _is_given(spec.training.communication, name):
            yield _idle_problem(f"training.communication.{to_camel(name)}", why)


def _idle_mtp_fields(spec: Spec, shape: ModelShape | None) -> Iterator[Problem]:
    if not spec.training.mtp_loss_coefficient or not _is_given(spec.training, "mtp_loss_coefficient"):
        return
    whys = (
        (shape is not None and not shape.mtp_layers, "the model has no MTP modules"),
        (spec.training.lora is not None, "LoRA trains and exports without MTP modules"),
        (spec.method is Method.GRPO, "GRPO trains and exports without MTP modules"),
    )
    for is_so, why in whys:
        if is_so:
            yield _idle_problem("training.mtpLossCoefficient", why)
            return


def _idle_policy_fields(spec: Spec, grpo: Grpo) -> Iterator[Problem]:
    on_cpu = spec.resources.accelerator is Accelerator.CPU
    cases: tuple[tuple[bool, str, BaseModel, tuple[str, ...], str], ...] = (
        (grpo.kl.coefficient == 0, "kl.", grpo.kl, ("kind", "apply_to"), "kl.coefficient 0 takes no penalty"),
        (grpo.policy_loss is PolicyLoss.CISPO, "", grpo, ("dual_clip",), "policyLoss CISPO bounds by clipHigh alone"),
        (grpo.overlong.penalty == 0, "overlong.", grpo.overlong, ("penalty_tokens",), "overlong.penalty is 0"),
        (
            not spec.data.eval,
            "evaluation.",
            grpo.evaluation,
            tuple(type(grpo.evaluation).model_fields),
            "there is no data.eval to answer",
        ),
        (on_cpu, "rollout.", grpo.rollout, ("gpu_memory_utilization",), "engines on CPUs have no GPU memory to share"),
    )
    for is_idle, path, section, names, why in cases:
        for name in names if is_idle else ():
            if _is_given(section, name):
                yield _idle_problem(f"grpo.{path}{to_camel(name)}", why)


def _idle_reward_fields(path: str, reward: Reward) -> Iterator[Problem]:
    has_process = reward.module is not None or reward.name in (BuiltInReward.MATH, BuiltInReward.FORMAT)
    wanted_by = (
        ("module_path", reward.module is not None, "module"),
        ("conversational", reward.module is not None, "module"),
        ("retries", reward.url is not None, "url"),
        ("headers_from", reward.url is not None, "url"),
        ("unavailable_timeout_seconds", reward.url is not None, "url"),
        ("start_timeout_seconds", has_process, "module, math and format"),
        ("concurrency", reward.url is not None or has_process, "module, url, math and format"),
        ("batch_size", reward.name is None, "module and url"),
    )
    for name, is_wanted, kinds in wanted_by:
        if not is_wanted and _is_given(reward, name):
            yield _idle_problem(f"{path}.{to_camel(name)}", f"only rewards of {kinds} read it")


def _is_given(section: BaseModel, name: str) -> bool:
    value = getattr(section, name)
    return bool(value != type(section).model_fields[name].default)


def _idle_problem(path: str, why: str) -> Problem:
    return Problem(Rule.IDLE, f"spec.{path}", f"{path} does nothing: {why}; remove it")

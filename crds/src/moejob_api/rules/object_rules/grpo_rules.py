"""Rewards, answers, losses and engines of GRPO."""

from __future__ import annotations

from moejob_api.job import Method, Spec
from moejob_api.job.evaluations import prompt_sets
from moejob_api.job.grpo import (
    BuiltInReward,
    CacheAcrossVersions,
    LossAggregation,
    MismatchMode,
    RolloutPlacement,
    WeightTransport,
)
from moejob_api.job.resources import Accelerator
from moejob_api.problems import Rule
from moejob_api.rules.object_rules.object_rule import IS_GRPO, ON_GPU, Complaint, ObjectRule

# Versions that answers may be older than the weights. Ratios of older ones are truncated for most of their tokens.
MOST_STALENESS = 64


def _one_reward_source(spec: Spec) -> Complaint:
    for index, reward in enumerate(spec.grpo.rewards if spec.grpo else ()):
        sources = [name for name in ("name", "module", "url") if getattr(reward, name) is not None]
        if len(sources) != 1:
            return (
                f"reward {index} has {' and '.join(sources) or 'no source'}; give exactly one of name, module and url"
            )
    return None


def _reward_pattern(spec: Spec) -> Complaint:
    for index, reward in enumerate(spec.grpo.rewards if spec.grpo else ()):
        is_format = reward.name is BuiltInReward.FORMAT
        if is_format and reward.pattern is None:
            return f"reward {index} is format and has no pattern; give the regular expression that answers must match"
        if not is_format and reward.pattern is not None:
            return f"reward {index} has a pattern, which only the reward format reads; remove it"
    return None


def _reward_headers(spec: Spec) -> Complaint:
    if spec.grpo is None or spec.resources.env_from:
        return None
    variables = {variable.name for variable in spec.resources.env}
    for index, reward in enumerate(spec.grpo.rewards):
        for header in reward.headers_from:
            if header.variable not in variables:
                return (
                    f"reward {index} takes header {header.header} from the variable {header.variable}, which "
                    "resources.env does not have; add it there, with a key of a Secret as its source"
                )
    return None


def _penalty_within_answer(spec: Spec) -> Complaint:
    if spec.grpo is None or spec.grpo.overlong.penalty_tokens <= spec.grpo.max_new_tokens:
        return None
    return (
        f"penaltyTokens {spec.grpo.overlong.penalty_tokens} is above maxNewTokens {spec.grpo.max_new_tokens}, so the "
        "shortest answer would pay for its length; lower it"
    )


def _whole_groups(spec: Spec) -> Complaint:
    if spec.grpo is None or spec.grpo.loss_aggregation is not LossAggregation.GROUP:
        return None
    grpo, batch_size = spec.grpo, spec.training.global_batch_size
    if grpo.updates_per_step is not None and grpo.prompts_per_step % grpo.updates_per_step:
        return (
            f"lossAggregation Group averages over groups, and updatesPerStep {grpo.updates_per_step} would cut some of "
            f"promptsPerStep {grpo.prompts_per_step} in two; change it to a divisor of {grpo.prompts_per_step}"
        )
    if batch_size is not None and batch_size % grpo.group_size:
        return (
            f"lossAggregation Group averages over groups, and updates of globalBatchSize {batch_size} would cut "
            f"groups of {grpo.group_size} in two; change it to a multiple of {grpo.group_size}"
        )
    return None


def _whole_vocabulary(spec: Spec) -> Complaint:
    if spec.grpo is None or spec.grpo.top_p == 1:
        return None
    return (
        f"topP {spec.grpo.top_p} samples from a part of the vocabulary, and the trainer's probabilities are over all "
        "of it: their ratios would be wrong; remove it, or lower temperature. evaluation.topP may be less than 1"
    )


def _mismatch_minimum(spec: Spec) -> Complaint:
    mismatch = None if spec.grpo is None else spec.grpo.mismatch
    if mismatch is None or mismatch.minimum == 0:
        return None
    if mismatch.mode is not MismatchMode.MASK:
        return f"minimum {mismatch.minimum} is for mode Mask; Truncate bounds weights from above: remove it"
    if mismatch.minimum < mismatch.maximum:
        return None
    return f"minimum {mismatch.minimum} is not below maximum {mismatch.maximum}, so every weight would be masked"


def _bounded_staleness(spec: Spec) -> Complaint:
    if spec.grpo is None or spec.grpo.rollout.staleness <= MOST_STALENESS:
        return None
    return (
        f"staleness {spec.grpo.rollout.staleness} lets answers be {spec.grpo.rollout.staleness} updates older than the "
        f"weights that learn from them; 1 to 4 keep engines busy, and more than {MOST_STALENESS} is refused: lower it"
    )


def _supported_cache(spec: Spec) -> Complaint:
    if spec.grpo is None or spec.grpo.rollout.cache_across_versions is CacheAcrossVersions.CLEAR:
        return None
    rollout = spec.grpo.rollout
    if rollout.placement is RolloutPlacement.SEPARATE and rollout.staleness > 0:
        return None
    return (
        "cacheAcrossVersions Keep is for answers that are unfinished when engines get new weights: set placement "
        f"Separate (it is {rollout.placement}) and staleness to 1 or more (it is {rollout.staleness}), or remove it"
    )


def _reference_of_resumed(spec: Spec) -> Complaint:
    if spec.grpo is None or spec.grpo.kl.coefficient == 0 or spec.checkpoint.resume_from is None:
        return None
    if spec.training.lora is not None:
        return None
    return (
        f"kl.coefficient {spec.grpo.kl.coefficient} needs the weights that training began with as its reference, and "
        "they come from model.source, not from a checkpoint; name the export of that job as model.source, or set 0"
    )


def _room_for_prompt(spec: Spec) -> Complaint:
    if spec.grpo is None or spec.grpo.max_new_tokens < spec.data.max_length:
        return None
    return (
        f"maxNewTokens {spec.grpo.max_new_tokens} leaves no token of data.maxLength {spec.data.max_length} for the "
        "prompt; raise data.maxLength or lower maxNewTokens"
    )


def _room_for_eval_prompts(spec: Spec) -> Complaint:
    most = spec.training.eval_answers.max_new_tokens
    if spec.method is Method.GRPO or not prompt_sets(spec) or most < spec.data.max_length:
        return None
    return (
        f"evalAnswers.maxNewTokens {most} leaves no token of data.maxLength {spec.data.max_length} for the prompts of "
        "data.eval; raise data.maxLength or lower maxNewTokens"
    )


def _rollout_replicas(spec: Spec) -> Complaint:
    if spec.grpo is None or spec.grpo.rollout.replicas is None:
        return None
    if spec.grpo.rollout.placement is RolloutPlacement.SEPARATE:
        return None
    return "replicas is for placement Separate; colocated engines follow from the trainer's GPUs: remove it"


def _rollout_sync(spec: Spec) -> Complaint:
    if spec.grpo is None:
        return None
    rollout = spec.grpo.rollout
    if rollout.sync is WeightTransport.IPC and rollout.placement is RolloutPlacement.SEPARATE:
        return "sync IPC shares memory of one GPU and cannot reach separate pods; use NCCL or Auto"
    if rollout.sync is WeightTransport.NCCL and rollout.placement is RolloutPlacement.COLOCATED:
        return "sync NCCL cannot join two processes on one GPU; colocated engines use IPC: set IPC or Auto"
    if rollout.sync in (WeightTransport.IPC, WeightTransport.NCCL) and spec.resources.accelerator is Accelerator.CPU:
        return f"sync {rollout.sync} needs GPUs; on CPU use Gloo, Disk or Auto"
    return None


GRPO_RULES: tuple[ObjectRule, ...] = (
    ObjectRule(
        Rule.EXACTLY_ONE,
        "spec.grpo.rewards",
        _one_reward_source,
        "self.rewards.all(r, (has(r.name) ? 1 : 0) + (has(r.module) ? 1 : 0) + (has(r.url) ? 1 : 0) == 1)",
        "every reward has exactly one of name, module and url",
        on="spec.grpo",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.grpo.rewards",
        _reward_pattern,
        "self.rewards.all(r, (has(r.name) && r.name == 'format') == has(r.pattern))",
        "the reward format has a pattern, and no other",
        on="spec.grpo",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.grpo.rewards",
        _reward_headers,
        "!has(self.grpo) || size(self.resources.envFrom) > 0 || self.grpo.rewards.all(r, r.headersFrom.all(h, "
        "h.variable in self.resources.env.map(e, e.name)))",
        "the variables of headersFrom are in resources.env or resources.envFrom",
        profile_may_heal=True,
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.grpo.overlong.penaltyTokens",
        _penalty_within_answer,
        "self.overlong.penaltyTokens <= self.maxNewTokens",
        "penaltyTokens is not above maxNewTokens",
        on="spec.grpo",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.grpo.lossAggregation",
        _whole_groups,
        "!has(self.grpo) || self.grpo.lossAggregation != 'Group' || ((!has(self.grpo.updatesPerStep) || "
        "self.grpo.promptsPerStep % self.grpo.updatesPerStep == 0) && (!has(self.training.globalBatchSize) || "
        "self.training.globalBatchSize % self.grpo.groupSize == 0))",
        "with lossAggregation Group no update cuts a group in two",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.grpo.topP",
        _whole_vocabulary,
        "self.topP == 1.0",
        "training samples from all of the vocabulary: topP is 1",
        on="spec.grpo",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.grpo.mismatch.minimum",
        _mismatch_minimum,
        "!has(self.mismatch) || [self.mismatch].all(m, m.minimum == 0.0 || (m.mode == 'Mask' && m.minimum < "
        "m.maximum))",
        "minimum is for mode Mask and below maximum",
        on="spec.grpo",
    ),
    ObjectRule(
        Rule.ROLLOUT,
        "spec.grpo.rollout.staleness",
        _bounded_staleness,
        f"self.rollout.staleness <= {MOST_STALENESS}",
        f"staleness is at most {MOST_STALENESS}",
        on="spec.grpo",
    ),
    ObjectRule(
        Rule.ROLLOUT,
        "spec.grpo.rollout.cacheAcrossVersions",
        _supported_cache,
        "self.rollout.cacheAcrossVersions == 'Clear' || "
        "(self.rollout.placement == 'Separate' && self.rollout.staleness > 0)",
        "cacheAcrossVersions Keep needs placement Separate and a staleness above 0",
        on="spec.grpo",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.grpo.kl.coefficient",
        _reference_of_resumed,
        "!has(self.grpo) || self.grpo.kl.coefficient == 0.0 || !has(self.checkpoint.resumeFrom) || "
        "has(self.training.lora)",
        "with resumeFrom there is no reference model; name the export as model.source",
    ),
    ObjectRule(
        Rule.SEQUENCE_LENGTH,
        "spec.training.evalAnswers.maxNewTokens",
        _room_for_eval_prompts,
        f"{IS_GRPO} || !self.data.eval.exists(d, d.format == 'Prompts') || "
        "self.training.evalAnswers.maxNewTokens < self.data.maxLength",
        "evalAnswers.maxNewTokens leaves no token of data.maxLength for the prompt",
    ),
    ObjectRule(
        Rule.SEQUENCE_LENGTH,
        "spec.grpo.maxNewTokens",
        _room_for_prompt,
        "!has(self.grpo) || self.grpo.maxNewTokens < self.data.maxLength",
        "maxNewTokens leaves no token of data.maxLength for the prompt",
    ),
    ObjectRule(
        Rule.ROLLOUT,
        "spec.grpo.rollout.replicas",
        _rollout_replicas,
        "!has(self.replicas) || self.placement == 'Separate'",
        "replicas is for placement Separate",
        on="spec.grpo.rollout",
    ),
    ObjectRule(
        Rule.ROLLOUT,
        "spec.grpo.rollout.sync",
        _rollout_sync,
        "!has(self.grpo) || [self.grpo.rollout].all(r, (r.sync != 'IPC' || r.placement == 'Colocated') && (r.sync != "
        "'NCCL' || r.placement == 'Separate') && "
        f"(!(r.sync in ['IPC', 'NCCL']) || {ON_GPU}))",
        "sync IPC is for Colocated, NCCL for Separate, and both need GPUs",
    ),
)

"""Lengths, schedules, evaluations and precisions of a training."""

from __future__ import annotations

from moejob_api.derived import has_float8_products
from moejob_api.job import Method, Spec
from moejob_api.job.base import Dtype
from moejob_api.job.resources import GpuType
from moejob_api.job.training import RecomputeGranularity, SchedulerKind
from moejob_api.layout.sizes import count_gpus
from moejob_api.problems import Rule
from moejob_api.rules.object_rules.object_rule import IS_GRPO, Complaint, ObjectRule, with_gpus


def _one_length(spec: Spec) -> Complaint:
    if (spec.training.max_steps is None) != (spec.training.epochs is None):
        return None
    number_given = "neither" if spec.training.max_steps is None else "both"
    return f"exactly one of maxSteps and epochs is needed, {number_given} is given"


def _one_microbatch_rule(spec: Spec) -> Complaint:
    tokens = spec.training.dynamic_batch_tokens
    if tokens is None:
        return None
    if spec.training.micro_batch_size != 1:
        return (
            f"dynamicBatchTokens {tokens} and microBatchSize {spec.training.micro_batch_size} both set the "
            "microbatch; remove microBatchSize"
        )
    if tokens < spec.data.max_length:
        return (
            f"dynamicBatchTokens {tokens} cannot hold one sequence of data.maxLength {spec.data.max_length}; set it "
            f"to {spec.data.max_length} or more"
        )
    return None


def _decay_of_wsd(spec: Spec) -> Complaint:
    scheduler = spec.training.scheduler
    if scheduler.kind is SchedulerKind.WSD and scheduler.decay_steps is None:
        return "kind WSD needs decaySteps, the length of its final decay; a tenth of maxSteps is common"
    return None


def _warmup_within_run(spec: Spec) -> Complaint:
    steps, warmup = spec.training.max_steps, spec.training.scheduler.warmup_steps
    if steps is None or warmup <= steps:
        return None
    return f"warmupSteps {warmup} is longer than the run of maxSteps {steps}"


def _minimum_below_peak(spec: Spec) -> Complaint:
    scheduler, peak = spec.training.scheduler, spec.training.optimizer.learning_rate
    if scheduler.minimum_learning_rate <= peak:
        return None
    return (
        f"minimumLearningRate {scheduler.minimum_learning_rate:g} is above the peak, optimizer.learningRate {peak:g}, "
        "so the rate would rise where it should decay; lower it"
    )


def _evaluation_data(spec: Spec) -> Complaint:
    if spec.training.eval_every is None or spec.data.eval:
        return None
    return f"evalEvery {spec.training.eval_every} has nothing to evaluate; add data.eval or remove it"


def _evaluations_to_count(spec: Spec) -> Complaint:
    if spec.training.early_stop is None or spec.training.eval_every is not None:
        return None
    return (
        "earlyStop counts evaluations, and without evalEvery there is none before the end; set evalEvery, with "
        "data.eval, or remove earlyStop"
    )


def _best_of_evaluations(spec: Spec) -> Complaint:
    if spec.checkpoint.keep_best is None or spec.data.eval:
        return None
    return f"keepBest {spec.checkpoint.keep_best} has no evaluations to compare; add data.eval or remove it"


def _deterministic_answers(spec: Spec) -> Complaint:
    if spec.method is Method.SFT or not spec.training.deterministic:
        return None
    return (
        "GRPO cannot be deterministic: engines batch answers as they arrive, and each batch is summed in another "
        "order; remove deterministic"
    )


def _profiled_steps(spec: Spec) -> Complaint:
    profile, steps = spec.training.profile, spec.training.max_steps
    if profile is None or steps is None or profile.first_step + profile.steps - 1 <= steps:
        return None
    return (
        f"firstStep {profile.first_step} and steps {profile.steps} end after maxSteps {steps}; set firstStep to "
        f"{max(1, steps - profile.steps + 1)}" + (f" and steps to {steps}" if profile.steps > steps else "")
    )


def _profiled_ranks(spec: Spec) -> Complaint:
    profile, count = spec.training.profile, count_gpus(spec.parallelism)
    if profile is None or max(profile.ranks) < count:
        return None
    return f"ranks name rank {max(profile.ranks)}, and parallelism has ranks 0 to {count - 1}; remove it"


def _recompute_settings(spec: Spec) -> Complaint:
    recompute = spec.training.recompute
    if recompute.granularity is not RecomputeGranularity.SELECTIVE and recompute.modules:
        return (
            f"modules are only for granularity Selective, not {recompute.granularity}, which would ignore them; "
            "remove modules"
        )
    layered = recompute.method is not None or recompute.layers is not None
    if recompute.granularity is not RecomputeGranularity.FULL and layered:
        return f"method and layers are only for granularity Full, not {recompute.granularity}; remove them"
    return None


def _precision_of_gradients(spec: Spec) -> Complaint:
    if spec.model.dtype is Dtype.FLOAT32 and spec.training.precision.gradients is Dtype.BFLOAT16:
        return "gradients in bfloat16 lose what weights in float32 keep; use float32, or model.dtype: bfloat16"
    return None


def _float8_products(spec: Spec) -> Complaint:
    if not has_float8_products(spec):
        return None
    if spec.method is not Method.SFT:
        return (
            "GRPO compares its probabilities with those of engines, which compute in model.dtype: FP8 differs by more "
            "than it may; remove compute"
        )
    if spec.model.dtype is not Dtype.BFLOAT16:
        return f"products of FP8 numbers are bfloat16, and model.dtype is {spec.model.dtype}; set it to bfloat16"
    if spec.training.deterministic:
        return "FP8 products do not give the same bits twice; remove compute or deterministic"
    if spec.resources.gpu_type is GpuType.A100:
        return "an A100 multiplies no FP8 numbers; remove compute, or take H100, H200 or B200"
    return None


TRAINING_RULES: tuple[ObjectRule, ...] = (
    ObjectRule(
        Rule.EXACTLY_ONE,
        "spec.training",
        _one_length,
        "has(self.maxSteps) != has(self.epochs)",
        "exactly one of maxSteps and epochs is needed",
        on="spec.training",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.training.dynamicBatchTokens",
        _one_microbatch_rule,
        "[self.training].all(t, !has(t.dynamicBatchTokens) || (t.microBatchSize == 1 && t.dynamicBatchTokens >= "
        "self.data.maxLength))",
        "dynamicBatchTokens replaces microBatchSize and must hold one sequence of data.maxLength",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.training.scheduler",
        _decay_of_wsd,
        "[self.scheduler].all(s, s.kind != 'WSD' || has(s.decaySteps))",
        "kind WSD needs decaySteps",
        on="spec.training",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.training.scheduler.warmupSteps",
        _warmup_within_run,
        "!has(self.maxSteps) || self.scheduler.warmupSteps <= self.maxSteps",
        "warmupSteps is longer than the run",
        on="spec.training",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.training.scheduler.minimumLearningRate",
        _minimum_below_peak,
        "self.scheduler.minimumLearningRate <= self.optimizer.learningRate",
        "minimumLearningRate is above optimizer.learningRate",
        on="spec.training",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.training.evalEvery",
        _evaluation_data,
        "!has(self.training.evalEvery) || size(self.data.eval) > 0",
        "evalEvery needs data.eval",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.training.earlyStop",
        _evaluations_to_count,
        "!has(self.earlyStop) || has(self.evalEvery)",
        "earlyStop needs evalEvery",
        on="spec.training",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.checkpoint.keepBest",
        _best_of_evaluations,
        "!has(self.checkpoint.keepBest) || size(self.data.eval) > 0",
        "keepBest needs data.eval",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.training.deterministic",
        _deterministic_answers,
        f"!({IS_GRPO}) || !self.training.deterministic",
        "GRPO cannot be deterministic",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.training.profile",
        _profiled_steps,
        "!has(self.profile) || !has(self.maxSteps) || self.profile.firstStep + self.profile.steps - 1 <= self.maxSteps",
        "profile ends after maxSteps",
        on="spec.training",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.training.profile.ranks",
        _profiled_ranks,
        with_gpus("!has(self.training.profile) || self.training.profile.ranks.all(r, r < n)"),
        "profile names a rank that parallelism does not have",
    ),
    ObjectRule(
        Rule.RECOMPUTE,
        "spec.training.recompute",
        _recompute_settings,
        "[self.recompute].all(r, (r.granularity == 'Selective' || size(r.modules) == 0) && (r.granularity == 'Full' "
        "|| !(has(r.method) || has(r.layers))))",
        "modules are for granularity Selective; method and layers are for Full",
        on="spec.training",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.training.precision.gradients",
        _precision_of_gradients,
        "self.model.dtype != 'float32' || self.training.precision.gradients == 'float32'",
        "gradients in bfloat16 need model.dtype bfloat16",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.training.precision.compute",
        _float8_products,
        f"!has(self.training.precision.compute) || (!({IS_GRPO}) && self.model.dtype == 'bfloat16' && "
        "!self.training.deterministic && !(has(self.resources.gpuType) && self.resources.gpuType == 'A100'))",
        "FP8 is for SFT with model.dtype bfloat16, without deterministic, on H100 or later",
    ),
)

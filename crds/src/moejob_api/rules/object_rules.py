"""Rules of a job that need no model: every rule once in Python and once in CEL.

The planner says the Python message, which carries the values. The API server evaluates the CEL twin (after
defaulting, in the policy of crd/policy.py) and says the summary. A test runs both on the same jobs through the API
server's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from moejob_api.arithmetic import round_up
from moejob_api.contract.torchrun import TORCHRUN_VARIABLES
from moejob_api.derived import has_float8_products
from moejob_api.job import Method, Spec
from moejob_api.job.base import Dtype
from moejob_api.job.evaluations import prompt_sets
from moejob_api.job.grpo import (
    BuiltInReward,
    CacheAcrossVersions,
    LossAggregation,
    MismatchMode,
    RolloutPlacement,
    WeightTransport,
)
from moejob_api.job.lifecycle import GangScheduler
from moejob_api.job.model import DataFormat, DataShape
from moejob_api.job.moe import DispatcherKind
from moejob_api.job.parallelism import ExpertLayout
from moejob_api.job.resources import Accelerator, GpuType, TolerationOperator
from moejob_api.job.storage import ResumeMode
from moejob_api.job.training import RecomputeGranularity, SchedulerKind
from moejob_api.layout.sizes import count_gpus
from moejob_api.pod_template.checks import template_complaints
from moejob_api.pod_template.in_cel import template_fields_cel
from moejob_api.problems import Problem, Rule

# More than any cluster has; keeps products of sizes far from int64, in which CEL computes.
MAX_GPUS = 1_048_576
# Versions that answers may be older than the weights. Ratios of older ones are truncated for most of their tokens.
MOST_STALENESS = 64

SHAPED_FORMATS: Mapping[DataShape, tuple[DataFormat, ...]] = {
    DataShape.ALPACA: (DataFormat.CHAT, DataFormat.PROMPT_COMPLETION, DataFormat.PROMPTS),
    DataShape.GSM8K: (DataFormat.CHAT, DataFormat.PROMPT_COMPLETION, DataFormat.PROMPTS),
    DataShape.SHARE_GPT: (DataFormat.CHAT,),
}

Complaint = str | None


@dataclass(frozen=True, slots=True)
class ObjectRule:
    """One rule: `complaint` is None when it holds, `cel` is true when it holds.

    `on` is the object that is `self` in the CEL twin: the smallest that holds all it reads. `profile_may_heal`: a job
    that breaks the rule may keep it once it is merged with its profile.
    """

    rule: Rule
    path: str
    complaint: Callable[[Spec], Complaint]
    cel: str
    summary: str
    on: str = "spec"
    profile_may_heal: bool = False


def object_problems(spec: Spec) -> Iterator[Problem]:
    """Every rule of this module that the spec breaks."""
    for rule in OBJECT_RULES:
        message = rule.complaint(spec)
        if message is not None:
            yield Problem(rule.rule, rule.path, message)


# --- method ---------------------------------------------------------------------------------------------------------


def _grpo_section(spec: Spec) -> Complaint:
    if (spec.method is Method.GRPO) == (spec.grpo is not None):
        return None
    if spec.method is Method.GRPO:
        return "method is GRPO but there is no grpo section; add one with at least one reward"
    return "the grpo section has no meaning for method SFT; remove it or set method to GRPO"


def _required_global_batch(spec: Spec) -> Complaint:
    if spec.method is Method.GRPO or spec.training.global_batch_size is not None:
        return None
    return "SFT needs globalBatchSize, the sequences of one optimizer update over all GPUs; 64 is a common start"


def _data_formats(spec: Spec) -> Complaint:
    wants_prompts = spec.method is Method.GRPO
    for index, dataset in enumerate((*spec.data.train, *spec.data.eval)):
        # An evaluation of SFT may generate answers too.
        may_ask = index >= len(spec.data.train) and dataset.format is DataFormat.PROMPTS
        if not may_ask and (dataset.format is DataFormat.PROMPTS) != wants_prompts:
            place = "train" if index < len(spec.data.train) else "eval"
            return f"{spec.method} cannot use format {dataset.format} of {place} source {dataset.source!r}; " + (
                "GRPO generates the answers: use Prompts"
                if wants_prompts
                else "SFT needs answers: use Chat, PromptCompletion or Text"
            )
    return None


def _shapes_of_formats(spec: Spec) -> Complaint:
    for dataset in (*spec.data.train, *spec.data.eval):
        formats = () if dataset.shape is None else SHAPED_FORMATS[dataset.shape]
        if dataset.shape is not None and dataset.format not in formats:
            return (
                f"shape {dataset.shape} of {dataset.source} cannot become format {dataset.format}; use "
                f"{' or '.join(formats)}"
            )
    return None


def _phases_for_offload(spec: Spec) -> Complaint:
    offloaded = [
        name
        for name, on in (
            ("offloadParameters", spec.memory.offload_parameters),
            ("offloadGradients", spec.memory.offload_gradients),
        )
        if on
    ]
    if spec.method is Method.GRPO or not offloaded:
        return None
    return (
        f"offloading by {' and '.join(offloaded)} only helps between the phases of GRPO: SFT needs weights and "
        "gradients on the GPU in every step; use offloadOptimizer: 1, sharding: FSDP or "
        "training.recompute instead"
    )


def _dropout_of_answers(spec: Spec) -> Complaint:
    if spec.grpo is None or spec.training.lora is None or not spec.training.lora.dropout:
        return None
    return (
        f"dropout {spec.training.lora.dropout} gives answers other probabilities in training than when they were "
        "generated, and GRPO's ratios compare the two; set lora.dropout: 0"
    )


def _separate_offload(spec: Spec) -> Complaint:
    if spec.grpo is None or spec.grpo.rollout.placement is RolloutPlacement.COLOCATED:
        return None
    if not (spec.memory.offload_parameters or spec.memory.offload_gradients):
        return None
    return (
        "offloadParameters and offloadGradients make room for a colocated engine; with placement Separate they only "
        "cost time: remove them"
    )


# --- training -------------------------------------------------------------------------------------------------------


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


# --- grpo -----------------------------------------------------------------------------------------------------------


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


# --- mixture of experts and memory ----------------------------------------------------------------------------------


def _replay_of_all_choices(spec: Spec) -> Complaint:
    factor = spec.moe.capacity_factor
    if spec.grpo is None or not spec.grpo.routing_replay or factor is None:
        return None
    return (
        f"capacityFactor {factor:g} drops choices of experts that the engine has computed with, and routingReplay "
        "trains on all of them; remove one of the two"
    )


def _gather_of_dynamic_batches(spec: Spec) -> Complaint:
    if spec.moe.dispatcher is DispatcherKind.ALL_GATHER and spec.training.dynamic_batch_tokens is not None:
        return (
            "dispatcher AllGather needs microbatches of one length, dynamicBatchTokens makes them differ; use AllToAll"
        )
    return None


def _sharding_conflicts(spec: Spec) -> Complaint:
    sharding = spec.memory.sharding
    if not sharding.has_weight_shards:
        return None
    if spec.parallelism.pipeline > 1:
        return (
            f"{sharding} gathers every layer on every GPU and does not combine with pipeline "
            f"{spec.parallelism.pipeline}, which would divide nothing further and gather in every microbatch; use "
            "pipeline: 1 with more data, or DistributedOptimizer"
        )
    if spec.memory.offload_optimizer > 0:
        return (
            f"{sharding} keeps the float32 weights that it divides on the GPU and has no host copy for "
            f"offloadOptimizer {spec.memory.offload_optimizer:g}; set it to 0 or use DistributedOptimizer"
        )
    return None


def _host_offload_on_cpu(spec: Spec) -> Complaint:
    memory = spec.memory
    offloads = (
        memory.offload_optimizer > 0
        or memory.offload_activations
        or memory.offload_parameters
        or memory.offload_gradients
    )
    if spec.resources.accelerator is Accelerator.CPU and offloads:
        return "on CPU everything is in host memory already; remove the offload settings"
    return None


def _activations_to_offload(spec: Spec) -> Complaint:
    if spec.memory.offload_activations and spec.training.recompute.granularity is RecomputeGranularity.FULL:
        return "recompute Full keeps no activations that offloadActivations could move; choose one of the two"
    return None


# --- checkpoints and storage ----------------------------------------------------------------------------------------


def _one_checkpoint_rhythm(spec: Spec) -> Complaint:
    if spec.checkpoint.every_steps is None or spec.checkpoint.every_minutes is None:
        return None
    return "everySteps and everyMinutes are both given; keep one"


def _run_to_go_on_with(spec: Spec) -> Complaint:
    if spec.checkpoint.resume is ResumeMode.WEIGHTS or spec.checkpoint.resume_from is not None:
        return None
    return "resume Run goes on with another job's run, and resumeFrom names none; name it, or leave out resume"


def _one_volume(spec: Spec) -> Complaint:
    if (spec.storage.claim_name is None) != (spec.storage.size is None):
        return None
    number_given = "neither" if spec.storage.size is None else "both"
    return f"exactly one of claimName (an existing claim) and size (a new one) is needed, {number_given} is given"


# --- resources and lifecycle ----------------------------------------------------------------------------------------


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


# --- layout ---------------------------------------------------------------------------------------------------------


def _product_text(spec: Spec) -> str:
    sizes = spec.parallelism
    names = ["tensor", "pipeline", "context", "data"]
    if sizes.expert_layout is ExpertLayout.PRODUCT:
        names.insert(2, "expert")
    factors = [f"{name} {getattr(sizes, name)}" for name in names if getattr(sizes, name) > 1]
    return " x ".join(factors) or "all sizes 1"


def _gpu_count(spec: Spec) -> Complaint:
    count = count_gpus(spec.parallelism)
    if count <= MAX_GPUS:
        return None
    return f"parallelism needs {count} GPUs ({_product_text(spec)}), more than the {MAX_GPUS} that moejob plans for"


def _whole_nodes(spec: Spec) -> Complaint:
    count, per_node = count_gpus(spec.parallelism), spec.resources.gpus_per_node
    if count > MAX_GPUS or count <= per_node or count % per_node == 0:
        return None
    below, above = count // per_node * per_node, round_up(count, per_node)
    return (
        f"parallelism needs {count} GPUs ({_product_text(spec)}), which gpusPerNode {per_node} does not divide; "
        f"change a size so that the product is {below} or {above}, or gpusPerNode to a divisor of {count}"
    )


def _tensor_in_node(spec: Spec) -> Complaint:
    count = count_gpus(spec.parallelism)
    per_pod = min(count, spec.resources.gpus_per_node)
    if count > MAX_GPUS or per_pod % spec.parallelism.tensor == 0:
        return None
    fitting = max(d for d in range(1, spec.parallelism.tensor + 1) if per_pod % d == 0)
    return (
        f"a tensor group of {spec.parallelism.tensor} GPUs would straddle nodes of {per_pod} GPUs; change tensor to "
        f"{fitting}, or gpusPerNode to a multiple of {spec.parallelism.tensor}"
    )


def _product_expert_tensor(spec: Spec) -> Complaint:
    sizes = spec.parallelism
    if sizes.expert_layout is ExpertLayout.FOLDED or sizes.expert_tensor in (None, sizes.tensor):
        return None
    return (
        f"expertLayout Product splits every expert over the tensor group of {sizes.tensor}, not over expertTensor "
        f"{sizes.expert_tensor}; remove expertTensor, or choose expertLayout: Folded"
    )


def _folded_grid(spec: Spec) -> Complaint:
    sizes = spec.parallelism
    if sizes.expert_layout is ExpertLayout.PRODUCT:
        return None
    inside, share = sizes.tensor * sizes.context * sizes.data, (sizes.expert_tensor or 1) * sizes.expert
    if inside % share == 0:
        return None
    return (
        f"expertTensor {sizes.expert_tensor or 1} x expert {sizes.expert} = {share} must divide tensor {sizes.tensor} "
        f"x context {sizes.context} x data {sizes.data} = {inside}, the GPUs of one pipeline stage over which Folded "
        f"spreads the experts; raise data to a multiple of {share} or lower expert"
    )


def _interleaved_stages(spec: Spec) -> Complaint:
    chunks = spec.parallelism.virtual_pipeline or 1
    if chunks == 1 or spec.parallelism.pipeline > 1:
        return None
    return f"virtualPipeline {chunks} cuts pipeline stages into chunks, but pipeline is 1; remove it or raise pipeline"


def _one_stage_split(spec: Spec) -> Complaint:
    sizes = spec.parallelism
    uneven = sizes.first_stage_layers is not None or sizes.last_stage_layers is not None
    if uneven and (sizes.embedding_counts_as_layer or sizes.loss_counts_as_layer):
        return (
            "firstStageLayers and lastStageLayers already say what the ends hold; remove them, or remove "
            "embeddingCountsAsLayer and lossCountsAsLayer"
        )
    return None


_IS_GRPO = "self.method == 'GRPO'"
_ON_GPU = "self.resources.accelerator == 'GPU'"

# Doubles, because int64 cannot hold every product; below MAX_GPUS they are exact.
_GPUS = (
    "double(p.tensor) * double(p.pipeline) * double(p.context) * double(p.data) * "
    "(p.expertLayout == 'Product' ? double(p.expert) : 1.0)"
)


def _with_gpus(condition: str) -> str:
    """A condition on spec about `p`, the parallelism, and `n`, its GPUs; it holds where they are too many to count."""
    return f"[self.parallelism].all(p, [{_GPUS}].all(g, g > {MAX_GPUS}.0 || [int(g)].all(n, {condition})))"


_HAS_SHAPE_OF_FORMAT = "!has(d.shape) || d.format == 'Chat' || (d.format != 'Text' && d.shape != 'ShareGPT')"

OBJECT_RULES: tuple[ObjectRule, ...] = (
    ObjectRule(
        Rule.METHOD,
        "spec.grpo",
        _grpo_section,
        f"({_IS_GRPO}) == has(self.grpo)",
        "grpo is given exactly when method is GRPO",
    ),
    ObjectRule(
        Rule.METHOD,
        "spec.training.globalBatchSize",
        _required_global_batch,
        f"{_IS_GRPO} || has(self.training.globalBatchSize)",
        "SFT needs globalBatchSize",
    ),
    ObjectRule(
        Rule.METHOD,
        "spec.data",
        _data_formats,
        f"[{_IS_GRPO}].all(prompts, self.data.train.all(d, (d.format == 'Prompts') == prompts) && "
        "(!prompts || self.data.eval.all(d, d.format == 'Prompts')))",
        "GRPO takes data of format Prompts, SFT trains on any other",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.data",
        _shapes_of_formats,
        f"self.train.all(d, {_HAS_SHAPE_OF_FORMAT}) && self.eval.all(d, {_HAS_SHAPE_OF_FORMAT})",
        "shape ShareGPT becomes Chat; Alpaca and GSM8K become Chat, PromptCompletion or Prompts",
        on="spec.data",
    ),
    ObjectRule(
        Rule.OFFLOAD,
        "spec.memory",
        _phases_for_offload,
        f"[self.memory].all(m, !m.offloadParameters && !m.offloadGradients) || {_IS_GRPO}",
        "offloadParameters and offloadGradients only help between the phases of GRPO; use offloadOptimizer, "
        "FSDP or recompute for SFT",
    ),
    ObjectRule(
        Rule.LORA,
        "spec.training.lora.dropout",
        _dropout_of_answers,
        f"!({_IS_GRPO}) || [self.training].all(t, !has(t.lora) || t.lora.dropout == 0.0)",
        "GRPO takes no lora.dropout",
    ),
    ObjectRule(
        Rule.OFFLOAD,
        "spec.memory",
        _separate_offload,
        "!has(self.grpo) || self.grpo.rollout.placement == 'Colocated' || [self.memory].all(m, !m.offloadParameters "
        "&& !m.offloadGradients)",
        "offloadParameters and offloadGradients make room for a colocated engine only",
    ),
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
        f"!({_IS_GRPO}) || !self.training.deterministic",
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
        _with_gpus("!has(self.training.profile) || self.training.profile.ranks.all(r, r < n)"),
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
        f"!has(self.training.precision.compute) || (!({_IS_GRPO}) && self.model.dtype == 'bfloat16' && "
        "!self.training.deterministic && !(has(self.resources.gpuType) && self.resources.gpuType == 'A100'))",
        "FP8 is for SFT with model.dtype bfloat16, without deterministic, on H100 or later",
    ),
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
        f"{_IS_GRPO} || !self.data.eval.exists(d, d.format == 'Prompts') || "
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
        f"(!(r.sync in ['IPC', 'NCCL']) || {_ON_GPU}))",
        "sync IPC is for Colocated, NCCL for Separate, and both need GPUs",
    ),
    ObjectRule(
        Rule.ROUTING,
        "spec.grpo.routingReplay",
        _replay_of_all_choices,
        "!has(self.grpo) || !has(self.grpo.routingReplay) || !self.grpo.routingReplay || !has(self.moe.capacityFactor)",
        "capacityFactor drops choices of experts that routingReplay trains on; remove one of the two",
    ),
    ObjectRule(
        Rule.ROUTING,
        "spec.moe.dispatcher",
        _gather_of_dynamic_batches,
        "self.moe.dispatcher != 'AllGather' || !has(self.training.dynamicBatchTokens)",
        "dispatcher AllGather needs microbatches of one length",
    ),
    ObjectRule(
        Rule.SHARDING,
        "spec.memory.sharding",
        _sharding_conflicts,
        "self.memory.sharding == 'DistributedOptimizer' || (self.parallelism.pipeline == 1 && "
        "self.memory.offloadOptimizer == 0.0)",
        "ZeRO2 and FSDP do not combine with pipeline or offloadOptimizer",
    ),
    ObjectRule(
        Rule.OFFLOAD,
        "spec.memory",
        _host_offload_on_cpu,
        f"{_ON_GPU} || [self.memory].all(m, m.offloadOptimizer == 0.0 && !m.offloadActivations && "
        "!m.offloadParameters && !m.offloadGradients)",
        "on CPU there is nothing to offload",
    ),
    ObjectRule(
        Rule.OFFLOAD,
        "spec.memory.offloadActivations",
        _activations_to_offload,
        "!self.memory.offloadActivations || self.training.recompute.granularity != 'Full'",
        "recompute Full keeps no activations to offload",
    ),
    ObjectRule(
        Rule.EXACTLY_ONE,
        "spec.checkpoint",
        _one_checkpoint_rhythm,
        "!(has(self.everySteps) && has(self.everyMinutes))",
        "at most one of everySteps and everyMinutes is given",
        on="spec.checkpoint",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.checkpoint.resume",
        _run_to_go_on_with,
        # The section's own default is judged before its fields have theirs.
        "!has(self.resume) || self.resume == 'Weights' || has(self.resumeFrom)",
        "resume Run needs resumeFrom",
        on="spec.checkpoint",
    ),
    ObjectRule(
        Rule.EXACTLY_ONE,
        "spec.storage",
        _one_volume,
        "has(self.claimName) != has(self.size)",
        "exactly one of claimName and size is needed",
        on="spec.storage",
    ),
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
        f"{_ON_GPU} || [self.resources].all(r, !(has(r.gpuType) || has(r.gpuMemoryGiB) || has(r.rdma)))",
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
        + _with_gpus("n > self.resources.gpusPerNode")
        + " && (!has(self.grpo) || self.grpo.rollout.placement != 'Colocated') && self.lifecycle.gang != 'Kueue' && "
        "(!has(self.lifecycle.queue) || self.lifecycle.gang != 'Auto') && !has(self.resources.topologyKey))",
        "spares need several trainer pods, and neither Colocated engines, Kueue nor topologyKey",
        profile_may_heal=True,
    ),
    ObjectRule(
        Rule.GPU_COUNT,
        "spec.parallelism",
        _gpu_count,
        f"[self.parallelism].all(p, {_GPUS} <= {MAX_GPUS}.0)",
        f"parallelism needs more than {MAX_GPUS} GPUs",
    ),
    ObjectRule(
        Rule.NODE_SIZE,
        "spec.parallelism",
        _whole_nodes,
        _with_gpus("[self.resources.gpusPerNode].all(node, n <= node || n % node == 0)"),
        "the GPUs that parallelism needs must fill whole nodes of gpusPerNode",
        profile_may_heal=True,
    ),
    ObjectRule(
        Rule.TENSOR_IN_NODE,
        "spec.parallelism.tensor",
        _tensor_in_node,
        _with_gpus("[self.resources.gpusPerNode].all(node, (n < node ? n : node) % p.tensor == 0)"),
        "a tensor group must not straddle two nodes",
        profile_may_heal=True,
    ),
    ObjectRule(
        Rule.EXPERT_TENSOR,
        "spec.parallelism.expertTensor",
        _product_expert_tensor,
        "!has(self.expertTensor) || self.expertLayout == 'Folded' || self.expertTensor == self.tensor",
        "expertLayout Product splits every expert over the tensor group; expertTensor is for Folded",
        on="spec.parallelism",
    ),
    ObjectRule(
        Rule.EXPERT_GRID,
        "spec.parallelism.expert",
        _folded_grid,
        "[self.parallelism].all(p, p.expertLayout == 'Product' || p.tensor * p.context * p.data % "
        "((has(p.expertTensor) ? p.expertTensor : 1) * p.expert) == 0)",
        "expertTensor x expert must divide tensor x context x data",
    ),
    ObjectRule(
        Rule.VIRTUAL_PIPELINE,
        "spec.parallelism.virtualPipeline",
        _interleaved_stages,
        "!has(self.virtualPipeline) || self.virtualPipeline == 1 || self.pipeline > 1",
        "virtualPipeline needs pipeline above 1",
        on="spec.parallelism",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.parallelism",
        _one_stage_split,
        "!(has(self.firstStageLayers) || has(self.lastStageLayers)) || !(self.embeddingCountsAsLayer || "
        "self.lossCountsAsLayer)",
        "firstStageLayers and lastStageLayers exclude embeddingCountsAsLayer and lossCountsAsLayer",
        on="spec.parallelism",
    ),
)

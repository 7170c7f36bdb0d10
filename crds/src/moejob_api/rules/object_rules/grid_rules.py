"""Sizes of groups, before there is a layout."""

from __future__ import annotations

from moejob_api.arithmetic import round_up
from moejob_api.job import Spec
from moejob_api.job.parallelism import ExpertLayout
from moejob_api.layout.sizes import count_gpus
from moejob_api.problems import Rule
from moejob_api.rules.object_rules.object_rule import GPUS, MAX_GPUS, Complaint, ObjectRule, with_gpus


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


GRID_RULES: tuple[ObjectRule, ...] = (
    ObjectRule(
        Rule.GPU_COUNT,
        "spec.parallelism",
        _gpu_count,
        f"[self.parallelism].all(p, {GPUS} <= {MAX_GPUS}.0)",
        f"parallelism needs more than {MAX_GPUS} GPUs",
    ),
    ObjectRule(
        Rule.NODE_SIZE,
        "spec.parallelism",
        _whole_nodes,
        with_gpus("[self.resources.gpusPerNode].all(node, n <= node || n % node == 0)"),
        "the GPUs that parallelism needs must fill whole nodes of gpusPerNode",
        profile_may_heal=True,
    ),
    ObjectRule(
        Rule.TENSOR_IN_NODE,
        "spec.parallelism.tensor",
        _tensor_in_node,
        with_gpus("[self.resources.gpusPerNode].all(node, (n < node ? n : node) % p.tensor == 0)"),
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

"""A problem of a job: which rule, where, and what to do. Everything that refuses a job says it with these."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Rule(StrEnum):
    """Every reason for which a job is refused. The values are part of `moejob plan --output json`."""

    # The document
    UNREADABLE = "Unreadable"
    FIELD = "Field"
    # One object
    METHOD = "Method"
    EXACTLY_ONE = "ExactlyOne"
    CONFLICT = "Conflict"
    ENVIRONMENT = "Environment"
    POD_TEMPLATE = "PodTemplate"
    PROFILE = "Profile"
    # Layout
    GPU_COUNT = "GpuCount"
    NODE_SIZE = "NodeSize"
    TENSOR_IN_NODE = "TensorInNode"
    EXPERT_GRID = "ExpertGrid"
    EXPERT_TENSOR = "ExpertTensor"
    VIRTUAL_PIPELINE = "VirtualPipeline"
    SEQUENCE_PARALLEL = "SequenceParallel"
    SEQUENCE_LENGTH = "SequenceLength"
    GLOBAL_BATCH = "GlobalBatch"
    MICROBATCHES = "Microbatches"
    SHARDING = "Sharding"
    OFFLOAD = "Offload"
    # Model
    MODEL_CONFIG = "ModelConfig"
    MODEL_FAMILY = "ModelFamily"
    IMPLEMENTATION = "Implementation"
    LAYERS = "Layers"
    HEADS = "Heads"
    KEY_VALUE_HEADS = "KeyValueHeads"
    EXPERTS = "Experts"
    WIDTH = "Width"
    LORA = "Lora"
    ROUTING = "Routing"
    RECOMPUTE = "Recompute"
    POSITIONS = "Positions"
    # Rollout
    ROLLOUT = "Rollout"
    # Memory
    MEMORY = "Memory"
    STORAGE = "Storage"
    # Those who run the operator
    LIMIT = "Limit"
    # Warnings only
    IDLE = "Idle"


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One reason to refuse a job (or, among warnings, to think twice)."""

    rule: Rule
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class InvalidSpec(ValueError):
    """A job, or a model's config, that cannot be read or used; carries every problem found."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = problems

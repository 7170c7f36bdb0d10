"""Labels, roles and paths of the contract: all that a program needs to find pods and files. No models."""

from __future__ import annotations

from enum import StrEnum


class Label(StrEnum):
    """Labels on everything the operator creates."""

    JOB = "moejob.dev/job"
    JOB_UID = "moejob.dev/job-uid"
    ROLE = "moejob.dev/role"
    ATTEMPT = "moejob.dev/attempt"
    INDEX = "moejob.dev/index"
    MANAGED_BY = "app.kubernetes.io/managed-by"


class PodRole(StrEnum):
    """The role of a pod. Trainers form the gang; rollout engines come and go."""

    TRAINER = "trainer"
    ROLLOUT = "rollout"


class PodPath(StrEnum):
    """Paths inside a pod that a job cannot change."""

    SHARED_MEMORY = "/dev/shm"
    TERMINATION = "/dev/termination-log"
    TEMPORARY = "/tmp"
    CLAIMS = "/claims"


# The last file of a checkpoint's folder: without it a checkpoint is none.
CHECKPOINT_MARKER = "complete.json"


class RunFile(StrEnum):
    """The files that a run leaves in its folder."""

    OWNER = "run.json"
    # Only `moejob run` writes it, for its user's eyes: in a cluster a Secret holds the secret of a job.
    SECRET = "run.secret"
    CLAIMS = "claims"
    STEPS = "steps.jsonl"
    # Load of each expert, in steps that get rarer: trainer/tracking/expert_log.py.
    EXPERTS = "experts.jsonl"
    CHECKPOINTS = "checkpoints"
    # The parts of a model beside its weights: the job's spec, the config and the tokenizer. With them a checkpoint can
    # be exported on any machine that has the folder.
    SPEC = "spec.json"
    TEMPLATE = "template"
    EXPORT = "export"
    EXPORT_MEGATRON = "export-megatron"
    # The model where no folder of others can be read as it is: moejob's own, or a converted checkpoint of Megatron.
    MODEL = "model"
    # The checkpoint that was converted; later starts need it no more.
    MODEL_ORIGIN = "model-origin.json"
    LOGS = "logs"
    # Events of every launcher, by attempt: moejob_api.contract.record.
    RECORD = "record"
    # Commits that names on the Hugging Face hub stood for when the run first asked; later starts use these.
    HUB = "hub.json"
    # Traces of the steps that training.profile names.
    PROFILE = "profile"
    # Engines start from it: config and code of the model, without weights.
    ENGINE_MODEL = "engine-model"
    # Weights on their way to engines.
    WEIGHTS = "weights"

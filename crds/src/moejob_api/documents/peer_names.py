"""Names that other trainers have for fields of a job: verl, TRL, PEFT, Megatron-LM, NeMo-RL, Axolotl and PyTorchJob.

A job is never read by them: who types one is answered with the field of this system. Names that are too general to mean
one field (`n`, `beta`) name each field that they may mean.
"""

from __future__ import annotations

from collections.abc import Mapping

_FIELDS: Mapping[str, str] = {
    "spec.model.source": "model_name model_name_or_path model_path base_model "
    "pretrained_model_name_or_path hf_checkpoint",
    "spec.model.dtype": "torch_dtype bf16 fp16 params_dtype",
    "spec.model.trustRemoteCode": "trust_remote_code",
    "spec.data.train": "dataset datasets train_files train_dataset dataset_name dataset_path data_path",
    "spec.data.eval": "val_files eval_dataset test_files validation_dataset",
    "spec.data.maxLength": "max_seq_length max_seq_len seq_length seq_len sequence_len cutoff_len",
    "spec.data.packing": "sample_packing pack_sequences use_remove_padding",
    "spec.parallelism.tensor": "tp tp_size tensor_parallel tensor_model_parallel_size tensor_parallel_size",
    "spec.parallelism.pipeline": "pp pp_size pipeline_parallel pipeline_model_parallel_size pipeline_parallel_size",
    "spec.parallelism.expert": "ep ep_size expert_parallel expert_model_parallel_size expert_parallel_size",
    "spec.parallelism.context": "cp cp_size context_parallel context_parallel_size sp_size "
    "ulysses_sequence_parallel_size",
    "spec.parallelism.data": "dp dp_size data_parallel data_parallel_size",
    "spec.parallelism.expertTensor": "etp etp_size expert_tensor_parallel_size",
    "spec.parallelism.virtualPipeline": "vpp vp vpp_size virtual_pipeline_model_parallel_size",
    "spec.parallelism.sequence": "sequence_parallel",
    "spec.training.maxSteps": "max_iters train_iters total_training_steps num_steps max_num_steps steps",
    "spec.training.epochs": "num_epochs num_train_epochs total_epochs max_num_epochs",
    "spec.training.globalBatchSize": "batch_size train_batch_size gbs global_batch train_global_batch_size",
    "spec.training.microBatchSize": "mbs micro_batch per_device_train_batch_size ppo_micro_batch_size_per_gpu "
    "micro_batch_size_per_gpu train_micro_batch_size",
    "spec.training.dynamicBatchTokens": "ppo_max_token_len_per_gpu max_tokens_per_gpu max_token_len_per_gpu",
    "spec.training.optimizer.learningRate": "lr",
    "spec.training.optimizer.weightDecay": "wd",
    "spec.training.optimizer.beta1": "adam_beta1",
    "spec.training.optimizer.beta2": "adam_beta2",
    "spec.training.optimizer.epsilon": "adam_epsilon adam_eps eps",
    "spec.training.scheduler.kind": "lr_scheduler lr_scheduler_type lr_decay_style lr_schedule",
    "spec.training.scheduler.warmupSteps": "lr_warmup_steps lr_warmup_iters num_warmup_steps warmup_iters warmup",
    "spec.training.scheduler.minimumLearningRate": "min_lr",
    "spec.training.scheduler.decaySteps": "lr_decay_steps lr_decay_iters",
    "spec.training.clipGrad": "max_grad_norm grad_clip gradient_clip_val gradient_clipping",
    "spec.training.recompute": "gradient_checkpointing activation_checkpointing enable_gradient_checkpointing "
    "recompute_activations",
    "spec.training.recompute.granularity": "recompute_granularity",
    "spec.training.evalEvery": "eval_steps eval_interval test_freq val_period eval_freq",
    "spec.training.lora": "peft use_peft adapter peft_config lora_config",
    "spec.training.lora.rank": "r lora_r lora_rank",
    "spec.training.lora.alpha": "lora_alpha",
    "spec.training.lora.dropout": "lora_dropout",
    "spec.training.lora.targets": "target_modules lora_target_modules lora_target",
    "spec.moe.auxLossCoefficient": "moe_aux_loss_coeff router_aux_loss_coef aux_loss_coef",
    "spec.moe.zLossCoefficient": "moe_z_loss_coeff",
    "spec.moe.capacityFactor": "moe_expert_capacity_factor",
    "spec.moe.dispatcher": "moe_token_dispatcher_type",
    "spec.memory.offloadOptimizer": "optimizer_offload optimizer_cpu_offload",
    "spec.memory.sharding": "fsdp zero_stage deepspeed use_distributed_optimizer fully_shard",
    "spec.grpo.groupSize": "num_generations num_generations_per_prompt n_samples_per_prompt rollout_n",
    "spec.grpo.promptsPerStep": "num_prompts_per_step rollout_batch_size",
    "spec.grpo.updatesPerStep": "ppo_mini_batch_size",
    "spec.grpo.epochsPerStep": "ppo_epochs num_iterations",
    "spec.grpo.maxNewTokens": "max_response_length max_completion_length max_tokens rollout_max_response_len",
    "spec.grpo.clipLow": "clip_ratio_low ratio_clip_min",
    "spec.grpo.clipHigh": "clip_ratio_high epsilon_high ratio_clip_max",
    "spec.grpo.dualClip": "clip_ratio_c ratio_clip_c",
    "spec.grpo.kl.coefficient": "kl_coef kl_loss_coef kl_coeff init_kl_coef reference_policy_kl_penalty",
    "spec.grpo.entropyCoefficient": "entropy_coeff entropy_coef",
    "spec.grpo.lossAggregation": "loss_agg_mode loss_type",
    "spec.grpo.advantage": "adv_estimator advantage_estimator",
    "spec.grpo.rewards": "reward_funcs reward_function reward_manager reward_model custom_reward_function",
    "spec.grpo.rollout.gpuMemoryUtilization": "vllm_gpu_memory_utilization gpu_mem_util",
    "spec.grpo.rollout.tensor": "rollout_tensor_parallel_size vllm_tensor_parallel_size rollout_tp",
    "spec.checkpoint.everySteps": "save_steps save_freq save_interval save_period checkpoint_interval",
    "spec.checkpoint.keep": "save_total_limit keep_top_k max_ckpt_to_keep max_actor_ckpt_to_keep",
    "spec.checkpoint.resumeFrom": "resume_from_checkpoint load load_checkpoint_path",
    "spec.checkpoint.async": "async_save",
    "spec.storage": "output_dir save_dir checkpoint_dir default_local_dir",
    "spec.resources.gpusPerNode": "n_gpus_per_node gpus_per_node nproc_per_node",
    "spec.resources.image": "container_image docker_image",
    "spec.lifecycle.suspend": "runPolicy",
    "spec.lifecycle.ttlSecondsAfterFinished": "ttl",
    "spec.lifecycle.gang": "schedulingPolicy gang_scheduling",
    "spec.tracking.wandb": "report_to use_wandb wandb_project logger",
    "spec.tracking.tensorboard": "tensorboard_dir",
}
# Names whose value follows from other fields, each with those.
_DERIVED: Mapping[str, str] = {
    "nodes come from the layout: spec.parallelism and spec.resources.gpusPerNode": "nnodes num_nodes n_nodes "
    "pytorchReplicaSpecs replicas replicaSpecs num_workers",
    "ranks come from spec.parallelism": "world_size num_gpus n_gpus gpus",
    "accumulation comes from spec.training.globalBatchSize and microBatchSize": "gradient_accumulation_steps "
    "grad_accum accumulate_grad_batches gas num_microbatches",
}
# General names, each with all fields that they may mean.
_SEVERAL: Mapping[str, tuple[str, ...]] = {
    "n": ("spec.grpo.groupSize",),
    "beta": ("spec.grpo.kl.coefficient", "spec.training.optimizer.beta1"),
    "betas": ("spec.training.optimizer.beta1", "spec.training.optimizer.beta2"),
}


def _fold_name(text: str) -> str:
    return text.replace("_", "").replace("-", "").casefold()


_BY_NAME: Mapping[str, tuple[str, ...]] = {
    _fold_name(name): (path,) for path, names in _FIELDS.items() for name in names.split()
} | {_fold_name(name): paths for name, paths in _SEVERAL.items()}
_REASONS: Mapping[str, str] = {_fold_name(name): reason for reason, names in _DERIVED.items() for name in names.split()}


def peer_fields(name: str) -> tuple[str, ...]:
    """Return the paths of the fields that another trainer's name may mean; none for a name that no trainer has."""
    return _BY_NAME.get(_fold_name(name), ())


def derived_reason(name: str) -> str | None:
    """Return where the value of another trainer's setting comes from here, if no field sets it."""
    return _REASONS.get(_fold_name(name))


def peer_names() -> Mapping[str, tuple[str, ...]]:
    """Return all names of other trainers by the path of our field, for the page of fields and tests."""
    return {path: tuple(names.split()) for path, names in _FIELDS.items()}

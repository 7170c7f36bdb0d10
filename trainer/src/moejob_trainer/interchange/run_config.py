"""The run_config.yaml from which Megatron-Bridge builds the model of a checkpoint."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any


def write_run_config(iteration: Path, provider: Any, tokenizer: Path) -> None:
    """Write the configuration that Megatron-Bridge itself puts beside the weights of a model that it converted."""
    config = import_module("megatron.bridge.training.config")
    optimizer = import_module("megatron.core.optimizer")
    tokenizers = import_module("megatron.bridge.training.tokenizers.config")
    container = config.ConfigContainer(
        model=provider,
        train=None,
        optimizer=optimizer.OptimizerConfig(use_distributed_optimizer=False),
        ddp=None,
        scheduler=None,
        dataset=None,
        logger=config.LoggerConfig(),
        tokenizer=tokenizers.TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tokenizer)),
        checkpoint=config.CheckpointConfig(
            async_save=False, save_optim=False, save_rng=False, ckpt_format="torch_dist"
        ),
        dist=None,
    )
    container.to_yaml(str(iteration / "run_config.yaml"))

"""The run_config.yaml from which Megatron-Bridge builds the model of a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

_DATA = "megatron.bridge.data"
# Settings of data sets that Megatron-Bridge reads with packages for images and video. No checkpoint names one.
_DATA_SETS = {"energon": "EnergonDatasetConfig", "mock_vlm_sft": "MockVLMSFTDatasetConfig"}


def write_run_config(iteration: Path, provider: Any, tokenizer: Path) -> None:
    """Write the configuration that Megatron-Bridge itself puts beside the weights of a model that it converted."""
    with _importable_data():
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


@contextmanager
def _importable_data() -> Iterator[None]:
    """Let Megatron-Bridge's settings import those of its data sets, without the packages that read them."""
    root = Path(import_module("megatron.bridge").__path__[0])
    stand_ins = {name: ModuleType(name) for name in (_DATA, f"{_DATA}.builders")}
    for name, module in stand_ins.items():
        # Their other modules are found there; what imports all of them does not run.
        module.__path__ = [str(root.joinpath(*name.split(".")[2:]))]
    for name, setting in _DATA_SETS.items():
        module = stand_ins[f"{_DATA}.builders.{name}"] = ModuleType(f"{_DATA}.builders.{name}")
        setattr(module, setting, type(setting, (), {}))
    missing = {name: module for name, module in stand_ins.items() if name not in sys.modules}
    sys.modules.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]

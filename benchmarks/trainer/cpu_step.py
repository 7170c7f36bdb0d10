"""Training steps on this machine's CPU: ours beside Transformers with grouped experts, taking turns in one process.

    python -m benchmarks.trainer.cpu_step

The same model, the same documents, the same AdamW. Transformers gets them as a padded batch, as its users do.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.record import Better, Result, record
from moejob_api.job import Spec
from moejob_api.layout.sizes import derive_layout as layout_of
from moejob_trainer.data.packing import batch_plan, build_global_batch
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.stages import build_stages
from moejob_trainer.megatron.topology import start_groups
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine, TrainingPlacement
from moejob_trainer.megatron.weights import initialise_weights
from moejob_trainer.model.architecture import read_architecture
from moejob_trainer.model.parameters import model_parameters
from moejob_trainer.objectives.losses import cross_entropy
from moejob_trainer.runtime.cpu_backend import cpu_backend
from moejob_trainer.training import Document, LossTerms, MicroBatch, TokenOutputs

Batch = list[npt.NDArray[np.int64]]
Step = Callable[[Batch], None]

ROUNDS, WARM = 9, 2
CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "rope_theta": 1e6,
}
# Conversations are of many lengths, and padding costs; equal lengths show what is left without it.
LENGTHS = {
    "documents of many lengths": tuple(int(length) for length in np.random.default_rng(3).integers(60, 512, 8)),
    "documents of one length": (288,) * 8,
}


def main() -> None:
    """Measures in turns and records."""
    ours, theirs = _ours(), _theirs()
    results = [result for case, lengths in LENGTHS.items() for result in _compare_steps(case, lengths, ours, theirs)]
    record(results, ["torch", "transformers", "megatron-core"])
    dist.destroy_process_group()


def _compare_steps(case: str, lengths: Sequence[int], ours: Step, theirs: Step) -> list[Result]:
    random = np.random.default_rng(0)
    pairs = []
    for _ in range(ROUNDS):
        batch = [random.integers(0, 2000, length) for length in lengths]
        pairs.append((_seconds(ours, batch), _seconds(theirs, batch)))
    tokens, kept = sum(lengths), pairs[WARM:]
    rates = [tokens / float(np.median(seconds)) for seconds in zip(*kept, strict=True)]
    ratio = float(np.median([their_seconds / our_seconds for our_seconds, their_seconds in kept]))
    peer = "Transformers, grouped experts, padded batch"
    return [
        Result("training-cpu", case, rates[0], "tokens/s", Better.HIGHER, peer=peer, peer_value=rates[1]),
        Result("training-cpu", f"{case}: times the speed of Transformers", ratio, "x", Better.HIGHER, target=1.2),
    ]


def _seconds(step: Step, batch: Batch) -> float:
    begun = time.perf_counter()
    step(batch)
    return time.perf_counter() - begun


def _ours() -> Step:
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    dist.init_process_group(cpu_backend())
    use_cpu()
    model = read_architecture(CONFIG)
    spec = _spec()
    sizes = layout_of(spec.parallelism, 8)
    groups = start_groups(sizes, spec.moe.dispatcher)
    device = torch.device("cpu")
    stages = build_stages(model, spec, sizes, groups, device)
    initialise_weights(stages, model_parameters(model.shape), groups, seed=1)
    engine = MegatronTrainingEngine(model, spec, stages, TrainingPlacement(groups, device), lambda _: 1e-4)

    def loss(outputs: TokenOutputs, batch: MicroBatch) -> LossTerms:
        return LossTerms(cross_entropy(outputs.log_probabilities, batch.weights))

    def step(batch: Batch) -> None:
        documents = [Document(tokens, np.ones(len(tokens), np.float32), n) for n, tokens in enumerate(batch)]
        engine.update(build_global_batch(documents, batch_plan(spec, sizes, 0))[0], loss)

    return step


def _theirs() -> Step:
    config = AutoConfig.for_model(**CONFIG)  # type: ignore[arg-type]
    config._experts_implementation = "grouped_mm"  # noqa: SLF001 how Transformers takes it
    model = AutoModelForCausalLM.from_config(config).float()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)

    def step(batch: Batch) -> None:
        longest = max(map(len, batch))
        tokens = torch.zeros((len(batch), longest), dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, document in enumerate(batch):
            tokens[row, : len(document)] = torch.from_numpy(document)
            mask[row, : len(document)] = 1
        adam.zero_grad()
        # In halves, as ours: microBatchSize is 4.
        for half in (slice(0, 4), slice(4, 8)):
            labels = tokens[half].masked_fill(mask[half] == 0, -100)
            model(tokens[half], attention_mask=mask[half], labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()

    return step


def _spec() -> Spec:
    return Spec.model_validate_json(
        json.dumps(
            {
                "method": "SFT",
                "model": {"source": "/none", "dtype": "float32"},
                "data": {"train": [{"source": "/none.jsonl", "format": "Text"}], "maxLength": 512},
                "training": {"maxSteps": 100, "globalBatchSize": 8, "microBatchSize": 4},
                "moe": {"balancing": "None"},
                "storage": {"size": "1Gi"},
                "resources": {"accelerator": "CPU"},
            }
        )
    )


if __name__ == "__main__":
    main()

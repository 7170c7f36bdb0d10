"""Every number of the memory estimate that no config.json and no layout says; docs/memory.md tells their origin."""

from __future__ import annotations

from moejob_api.quantities import GIB

# Megatron pads the vocabulary so that every tensor rank gets a multiple of this many rows.
VOCABULARY_MULTIPLE = 128

# The loss reads the logits of this many tokens at a time: large enough for a full-speed matrix product, small enough
# that full-vocabulary logits never exist. The trainer imports it.
LOSS_CHUNK_TOKENS = 2048

# An update that needs copies of its numbers makes those of this many at a time, or of the largest parameter; one on the
# host of a GPU exchanges as many. The trainer imports it.
UPDATE_ELEMENTS = 1 << 26

# Rows that reach the fullest GPU of an expert group, as a multiple of an even share, when nothing is dropped.
IMBALANCE_BALANCED = 1.25
IMBALANCE_UNBALANCED = 1.5

# int64 positions: where a row came from and where it goes back to, for tokens and once more for the sort by expert.
INDEX_BYTES = 8

# CUDA context, cuBLAS and cuDNN workspaces, compiled kernels: 2.0 GiB beside the allocator on an H200.
CONTEXT_BYTES = 2 * GIB
# Buffers of one NCCL communicator, and of each peer in the node that it sends to alone: 484 and 384 MiB on four H200
# without multicast. Peers on other nodes take a few MiB, which are left out.
COMMUNICATOR_BYTES = 484 * 2**20
PEER_BYTES = 384 * 2**20
# The most memory of a GPU that others write rows to under dispatcher Flex: room for the worst routing of 32,768 tokens
# of 2,048 numbers in bfloat16 over eight GPUs. What does not fit goes through NCCL.
MOST_PEER_MEMORY_BYTES = GIB
# What the caching allocator cannot give back beyond what tensors ask for, as a share of what comes and goes in a step.
FRAGMENTATION = 0.15
# A rank's own host memory: the interpreter, torch, data loading.
HOST_PROCESS_BYTES = 4 * GIB
# The process that converts a checkpoint of Megatron: 0.8 GiB with Megatron-Bridge imported, measured.
CONVERSION_PROCESS_BYTES = 1 * GIB
CPU_RANK_BYTES = GIB
# /dev/shm of each rank: NCCL's rings where GPUs do not reach each other, and the queues of an engine's workers.
SHARED_BYTES_OF_GPU = 2 * GIB
SHARED_BYTES_OF_CPU = GIB

# Weights of a layer that is being computed, and what arrives of the next one.
FSDP_UNITS = 2
# What of a mixture's layers beside their experts may stay whole for a step, however small its experts are.
KEPT_WHOLE_BYTES = 2 * GIB

# FP8 copies of a weight, a byte an element: its rows for the way forward, its columns for the gradient of its input.
ROUNDINGS = 2

# A vLLM engine beside weights and KV cache: context, CUDA graphs, activations of its largest prefill. On one H200 it
# was 2.6 GiB for Qwen3-30B-A3B.
ENGINE_WORKSPACE_BYTES = 3 * GIB
# A sleeping engine keeps this much of its GPU.
ENGINE_ASLEEP_BYTES = 3 * GIB // 2
ENGINE_VOCABULARY_MULTIPLE = 64
# KV cache of an engine on CPUs: enough for thousands of tokens of a model that is small enough for a CPU; vLLM itself
# would take the node's memory. The rollout image imports it.
CPU_ENGINE_CACHE_BYTES = GIB // 2
# Its processes beside weights and cache: 1.0 GiB on two cores, before batches.
CPU_ENGINE_PROCESS_BYTES = 2 * GIB
# Fewer sequences at once than this and an engine spends its time reading weights.
USEFUL_SEQUENCES = 32
# Weights travel to the engine in buckets of 512 MiB, beside one whole tensor that ranks gather. Three copies of a
# bucket exist: its tensors, the tensors side by side, and the same with the tensors of other ranks.
SYNC_BUCKET_BYTES = 3 * GIB // 2

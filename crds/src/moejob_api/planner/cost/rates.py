"""The share of a GPU's published speed that is reached, and the time of collectives; docs/cost.md has the measurements.

Every formula saturates: more rows or wider matrices never make an operation less efficient.
"""

from __future__ import annotations

from dataclasses import dataclass

from moejob_api.hardware import Hardware

# Plain matrix products: 796 of 989 TFLOP/s at 8192^3, 700 to 760 within a step on matrices of 2048 columns.
GEMM_SHARE, GEMM_ROWS, GEMM_WIDTH = 0.82, 512, 512
# Products of many experts at once, which add weight gradients to their sums too: 724 TFLOP/s at 4,096 rows an expert.
GROUPED_SHARE, GROUPED_ROWS, GROUPED_WIDTH = 0.73, 120, 80
# Products of FP8 rows, beside those above: 1.6 times as fast for Qwen3-30B-A3B's experts, 1.8 to 2.0 for Mixtral's and
# DeepSeek-V3's. Rounding reads two bytes an element and writes one: 3.0 of 3.35 TB/s of an H100.
FLOAT8_SPEED, ROUNDING_SHARE, ROUNDING_BYTES = 1.75, 0.85, 3
# Flash attention with both passes: 303 TFLOP/s on documents of 1,024 tokens, 425 within a training step at 4,096.
ATTENTION_SHARE, ATTENTION_TOKENS = 0.50, 700
# Chunked linear attention is many small products.
LINEAR_ATTENTION_SHARE = 0.15
# Norms, rotary embedding, gates, permutations and copies read and write what a layer keeps about eight times over.
ELEMENTWISE_PASSES = 8
# Streaming kernels: the optimizer 4.1 of 4.8 TB/s; adding weight gradients into their buffer 2.6.
OPTIMIZER_SHARE, ACCUMULATION_SHARE = 0.85, 0.55
# All-to-all reached 262 of 450 GB/s while it ran and less with the waiting of uneven ranks.
NVLINK_SHARE, ALL_TO_ALL_SHARE, NETWORK_SHARE = 0.75, 0.48, 0.80
IN_NODE_LATENCY_SECONDS, NETWORK_LATENCY_SECONDS = 15e-6, 40e-6
# A host's memory serves all its GPUs; Adam there reads and writes 28 bytes a parameter: 2.5 G of them in a step of
# 1.44 s, which takes 0.43 without, beside one H200.
HOST_ADAM_BYTES, HOST_ADAM_BYTES_PER_SECOND = 28, 90e9
# What layers keep travels to the host and back, 26 GiB each way of 32,768 tokens: a step of 5.41 s.
HOST_COPY_SHARE = 0.9
# Of the exchange with replicas over a network, what neither the backward pass nor the next forward pass hides. Over
# NVLink it costs the products beside it as much as it hides: 84,639 tokens/s with overlap, 84,464 without.
DATA_EXPOSED, DATA_EXPOSED_IN_NODE = 0.3, 1.0
# Where replicas copy from one another's memory the products keep the multiprocessors.
READ_EXPOSED = 0.35
# vLLM with CUDA graphs, a token of each of 8 to 512 sequences through 48 layers of Qwen3-30B-A3B: 13 to 38 ms on one
# H100. Reading weights and caches takes 8 to 22 of them; the rest grows with layers, and with sequences (their logits).
ENGINE_LAYER_SECONDS, ENGINE_SEQUENCE_SECONDS, ENGINE_GEMM_SHARE = 0.105e-3, 18e-6, 0.40
# Most answers that a trainer requests of an engine at a time.
MOST_AT_ONCE = 512
# Its sum of a few rows over two GPUs.
ENGINE_SUM_SECONDS = 5e-6
# A host starts 107 kernels for both passes of a layer of experts, and ranks wait for one another where they meet. Hosts
# differ: the host of one H200 takes 7 ms, the host of four 8 to 10. A dense layer's time is scaled from the experts'.
EXPERTS_HOST_SECONDS, DENSE_HOST_SECONDS, EXCHANGE_SECONDS = 7.5e-3, 4.0e-3, 0.35e-3


@dataclass(frozen=True, slots=True)
class GpuMachine:
    """A GPU and how many of them share a node."""

    hardware: Hardware
    gpus_per_node: int

    def members_in_node(self, stride: int, size: int) -> int:
        """Members of a group that share a node, when neighbours in the group are `stride` ranks apart."""
        return max(1, min(size, self.gpus_per_node // stride))


def gemm_seconds(flops: float, rows: float, width: float, hardware: Hardware) -> float:
    """A plain matrix product; width is the smaller of its inner and its output dimension."""
    share = GEMM_SHARE * rows / (rows + GEMM_ROWS) * width / (width + GEMM_WIDTH)
    return flops / (share * hardware.bf16_flops_per_second)


def grouped_seconds(flops: float, rows_per_expert: float, width: float, hardware: Hardware) -> float:
    """One product for all experts of a GPU."""
    if flops == 0:
        return 0.0
    share = GROUPED_SHARE * rows_per_expert / (rows_per_expert + GROUPED_ROWS) * width / (width + GROUPED_WIDTH)
    return flops / (share * hardware.bf16_flops_per_second)


def rounding_seconds(elements: float, hardware: Hardware) -> float:
    """Round that many elements to FP8, row by row."""
    return elements * ROUNDING_BYTES / (ROUNDING_SHARE * hardware.memory_bytes_per_second)


def attention_seconds(flops: float, tokens: int, hardware: Hardware) -> float:
    """Flash attention over documents of that many tokens."""
    share = ATTENTION_SHARE * tokens / (tokens + ATTENTION_TOKENS)
    return flops / (share * hardware.bf16_flops_per_second)


def gather_seconds(amount: float, stride: int, size: int, machine: GpuMachine) -> float:
    """An all-gather to `amount` bytes on every rank, or a reduce-scatter from that; inside and outside at once."""
    if size == 1 or amount == 0:
        return 0.0
    members = machine.members_in_node(stride, size)
    hardware = machine.hardware
    inside = amount * (size - 1) / size / (hardware.nvlink_bytes_per_second * NVLINK_SHARE) if members > 1 else 0.0
    if members == size:
        return inside + IN_NODE_LATENCY_SECONDS
    # Every member brings its own network card.
    nodes = size / members
    across = amount * (nodes - 1) / nodes / members / (hardware.network_bytes_per_second * NETWORK_SHARE)
    return max(inside, across) + NETWORK_LATENCY_SECONDS


def replicas_seconds(amount: float, stride: int, size: int, machine: GpuMachine) -> float:
    """The seconds that a gather or scatter over replicas adds to a step which computes beside it."""
    is_inside = machine.members_in_node(stride, size) == size
    exposed = DATA_EXPOSED_IN_NODE if is_inside else DATA_EXPOSED
    return exposed * gather_seconds(amount, stride, size, machine)


def all_to_all_seconds(amount: float, stride: int, size: int, machine: GpuMachine) -> float:
    """Every rank sends `amount` bytes, an equal share to each member of the group, itself included."""
    if size == 1 or amount == 0:
        return 0.0
    members = machine.members_in_node(stride, size)
    hardware = machine.hardware
    inside = amount * (members - 1) / size / (hardware.nvlink_bytes_per_second * ALL_TO_ALL_SHARE)
    if members == size:
        return inside + IN_NODE_LATENCY_SECONDS
    across = amount * (size - members) / size / (hardware.network_bytes_per_second * NETWORK_SHARE)
    return max(inside, across) + NETWORK_LATENCY_SECONDS


def send_seconds(amount: float, stride: int, machine: GpuMachine) -> float:
    """One message to the rank `stride` further on."""
    hardware = machine.hardware
    if stride < machine.gpus_per_node:
        return amount / (hardware.nvlink_bytes_per_second * NVLINK_SHARE) + IN_NODE_LATENCY_SECONDS
    return amount / (hardware.network_bytes_per_second * NETWORK_SHARE) + NETWORK_LATENCY_SECONDS

"""Layers as functions of tensors; they know no module, no configuration and nothing of Megatron."""

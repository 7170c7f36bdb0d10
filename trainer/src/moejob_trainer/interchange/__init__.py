"""Checkpoints of the Megatron world (torch_dist) to and from Hugging Face's files, which the trainer reads and writes.

Runs where `moejob-trainer[megatron]` is installed. Names and layouts are Megatron-Bridge's; no model is built.
"""

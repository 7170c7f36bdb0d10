"""Evaluations of a run: losses of held-out sets, scored answers to prompts, and the order of their checkpoints.

Takes values and knows nothing of setup/, of checkpoints' files or of Megatron.
"""

"""Megatron's own models: Megatron-Bridge reads the config, and `GPTModel` computes, behind the stages of the engine.

Of ours are the attention over packed documents and context ranks, the grouped product of experts, norms, the loss and
the optimizer. Nothing outside this room and its setup knows which implementation trains.
"""

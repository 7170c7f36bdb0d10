"""Process groups and the collectives over them; imports torch.distributed and nothing of Megatron."""

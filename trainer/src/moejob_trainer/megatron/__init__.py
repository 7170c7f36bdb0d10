"""What the trainer takes from Megatron-Core: process groups, pipeline schedules and gradient buffers."""

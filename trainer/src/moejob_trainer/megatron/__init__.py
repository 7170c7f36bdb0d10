"""The engine on Megatron-Core: its process groups, pipeline schedules and gradient buffers."""

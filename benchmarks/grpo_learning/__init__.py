"""GRPO of published models on tasks that they can learn: curves of several seeds."""

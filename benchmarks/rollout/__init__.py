"""The rollout engines of a GRPO run, measured."""

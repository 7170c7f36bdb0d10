"""Rewards: what an answer is worth, computed outside the process that trains."""

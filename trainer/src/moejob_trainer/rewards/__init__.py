"""Rewards: the worth of an answer, computed outside the process that trains."""

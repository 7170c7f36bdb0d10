"""Evaluations of a run: their order, which decides on checkpoints that stay and on an early end."""

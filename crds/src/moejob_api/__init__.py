"""Owns what a MoETrainingJob means; knows nothing of Kubernetes clients, torch or the terminal."""

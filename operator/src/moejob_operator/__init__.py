"""Owns the pods and the status of every MoETrainingJob; knows nothing of torch or of how a step is computed."""

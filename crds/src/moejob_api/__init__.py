"""The meaning of a MoETrainingJob; knows nothing of Kubernetes clients, torch or the terminal."""

"""Owns the training run inside a pod; knows nothing of Kubernetes objects or of the operator."""

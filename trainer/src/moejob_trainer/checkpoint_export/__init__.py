"""A model in Hugging Face's files out of a run's checkpoint: one process, one tensor at a time, no model is built."""

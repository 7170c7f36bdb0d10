"""The cost of training: run in the trainer environment."""

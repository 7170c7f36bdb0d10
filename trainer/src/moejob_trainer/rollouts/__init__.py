"""Rollouts: answers that engines generate from the weights that the trainer publishes to them."""

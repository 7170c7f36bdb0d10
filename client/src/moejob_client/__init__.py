"""Jobs of a cluster from Python. The operator sends its requests through the same HTTP layer."""

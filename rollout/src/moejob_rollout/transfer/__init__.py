"""Transports of weights that vLLM does not have: between CPUs, through volumes that all share, and without pickles."""

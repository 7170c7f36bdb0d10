"""The runtime of the operator: clients, caches, queue, election, metrics.

Knows nothing of how a job is decided about.
"""

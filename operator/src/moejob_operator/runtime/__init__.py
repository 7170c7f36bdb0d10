"""The process that runs the operator: kopf, its session and settings, queue, election, metrics.

Knows nothing of how a job is decided about.
"""

"""The process that runs the operator: kopf, its session and settings, queue, election, metrics.

Builds each part of a replica once and starts and stops all of them with kopf. Knows nothing of how a job is decided
about. No other room may import it: handlers.py and the programs beside the rooms do.
"""

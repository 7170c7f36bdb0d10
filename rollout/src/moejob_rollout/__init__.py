"""The rollout engine: vLLM's server, started from the contract's environment, with weights that only ever come by sync.

`python -m moejob_rollout` is process 1 of a rollout pod, and a child of the launcher where engines share the trainer's
GPUs. Knows nothing of training; the trainer speaks to it over HTTP.
"""

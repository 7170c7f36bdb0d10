"""The contract of processes that may not import one another: operator, pods, engines and `moejob run`."""

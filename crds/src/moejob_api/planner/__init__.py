"""The GPUs, memory and time of a job, and the layouts that would be accepted or faster. Nothing here does I/O."""

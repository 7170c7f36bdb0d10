"""Process 1 of every trainer pod, and what `moejob run` starts: it starts ranks, watches them and answers for them.

What others use:

- `python -m moejob_trainer.launcher` with the contract's environment; `--last-word FILE` and `--logs FOLDER` for
  `moejob run`. In code: the function of `launch`, which takes the environment, options and a
  request to stop, and returns the exit code.
- A rank is `moejob_trainer.rank:main`, a function that takes nothing and returns an exit code. Set for it: all that
  torch's env:// reads, LOCAL_RANK, TORCHELASTIC_RESTART_COUNT (the round, the same number on all ranks), the contract's
  own variables. SIGTERM asks it to save; it then returns 143. Wrong configuration is 78. Anything else but 0 is a
  failure. It ends as children of multiprocessing do: functions registered with atexit are not called.
- `moejob_trainer.runtime.heartbeats.Heartbeat` reports that a rank is alive and, on rank 0, the progress of the run.
- `moejob_trainer.runtime.fencing`: the launcher of pod 0 has taken the fence token before ranks start; a rank asks
  `Fence.of_rank().is_ours(FenceToken.of_rank())` before it commits.

Imports neither torch nor Megatron nor transformers: those are for the fork server, and for its child that is the store
of the ranks.
"""

"""Recovery from failures: which action follows, and what is remembered so that each failure is charged once. Pure.

restarts.py owns the ladder, state.py the transitions of a recovery, engine_starts.py the end of an engine that cannot
start. Operator, launcher and `moejob run` decide by these functions and keep no budgets of their own. Must not know
pods, processes or clocks: the caller passes what failed and how long ago.
"""

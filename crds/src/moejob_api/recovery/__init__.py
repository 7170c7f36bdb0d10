"""Recovery from failures: which action follows, and what is remembered so that each failure is charged once. Pure."""

"""Diagnosis of a job that does not train: the obstacle, since when, what follows and the fix. Pure, of API bodies."""

"""The job's status: recomputed as a whole from what was observed and decided. Equal inputs, equal status."""

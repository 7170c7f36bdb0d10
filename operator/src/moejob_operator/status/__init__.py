"""What the job's status says: recomputed as a whole from what was observed and decided. Equal inputs, equal status."""

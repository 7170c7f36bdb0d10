"""Layout arithmetic: group sizes, pipeline stages and the place of every rank. Pure whole-number arithmetic."""

"""Owns the model: which parameters it has, which part of each a rank holds, and the modules that hold them."""

"""Check that the trained model is the published one.

A fixed text goes through both, and every layer's result is compared with what Transformers makes of the same input.
"""

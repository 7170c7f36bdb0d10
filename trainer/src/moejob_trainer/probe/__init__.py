"""Whether the model that is trained is the one that is published: a fixed text goes through both, and every layer's
result is compared with what Transformers makes of the same input.
"""

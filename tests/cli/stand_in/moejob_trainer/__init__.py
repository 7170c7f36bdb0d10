"""Stands in for the trainer where there is no torch: found on PYTHONPATH by the Python that a test names."""

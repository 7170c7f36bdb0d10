"""Builds the container images of images/ with what the machine has; needs nothing but Python's own library."""

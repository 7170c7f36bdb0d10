"""The errors by which a request to the API server ends, by what a caller can do about each."""

from __future__ import annotations


class Conflict(Exception):
    """The object changed since it was read: read and decide again."""


class Retryable(Exception):
    """The API server could not answer now; the same request may succeed later."""


class Forbidden(Exception):
    """The API server refused, and would again: quota, admission, an invalid object. The message is for the user."""

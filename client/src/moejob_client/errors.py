"""The errors by which a request to the API server ends, by what a caller can do about each."""

from __future__ import annotations


class Conflict(Exception):
    """The object changed since it was read: read and decide again."""


class Retryable(Exception):
    """The API server could not answer now; the same request may succeed later."""


class Forbidden(Exception):
    """The API server refused, and would again: quota, admission, an invalid object. The message is for the user."""


class NotFound(Exception):
    """There is no such object, or no such API."""


class AlreadyExists(Exception):
    """There is an object of that name already."""


class Unauthorized(Retryable):
    """The API server does not accept the credentials, which a program that lives long may renew."""


class Expired(Retryable):
    """The requested version is too old to continue from: list again."""

"""Needs a package that no image has."""


def load() -> None:
    """Fail."""
    import not_in_any_image  # type: ignore[import-not-found]  # noqa: F401, PLC0415


load()

"""Bounds for a foreign program that runs in this process: a chat template of a model or of a job.

Jinja's sandbox keeps a template away from Python's objects, but bounds neither time nor memory: two nested loops of
100,000 take hours, and a text that doubles itself forty times takes a terabyte. A timer of processor time ends loops,
since Python handles signals between two operations. A limit on addresses, above those in use, ends growth. A power of
whole numbers is the one operation that takes long without much memory, so templates with powers are refused.
"""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

from jinja2 import TemplateError, nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

_SECONDS = 60.0
_BYTES = 1024**3
# A template writes a message at most a few times, and instructions of its own.
_CHARACTERS, _TIMES = 1024**2, 64
_PAGE = resource.getpagesize()


class ExceedsBounds(TemplateError):
    """A template that takes more time or memory than any chat template needs."""


def refuse_powers(source: str) -> None:
    """Raise ExceedsBounds for a template that computes powers; TemplateError where it cannot be parsed."""
    if _has_powers(source):
        raise ExceedsBounds("it computes a power (**), which no chat template needs; remove it")


@cache
def _has_powers(source: str) -> bool:
    # The environment of Transformers, for its extensions. It compiles nothing here: compiling computes constants.
    environment = _compile_jinja_template("").environment
    return environment.parse(source).find(nodes.Pow) is not None


def refuse_excess(text: str, given_characters: int) -> None:
    """Raise ExceedsBounds for a text that is out of proportion to the template's input."""
    most_characters = _CHARACTERS + _TIMES * given_characters
    if len(text) > most_characters:
        raise ExceedsBounds(
            f"it writes {len(text):,} characters of {given_characters:,}; {most_characters:,} are taken"
        )


@contextmanager
def bounded_work() -> Iterator[None]:
    """Run the body within bounds of time and memory, or raise ExceedsBounds."""
    try:
        with _bounded_memory(), _bounded_time():
            yield
    except MemoryError as error:
        raise ExceedsBounds(f"it takes more than {_BYTES // 1024**2} MiB") from error
    except RecursionError as error:
        raise ExceedsBounds("it calls itself too often") from error


@contextmanager
def _bounded_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    present = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * _PAGE
    limit_bytes = present + _BYTES
    if soft != resource.RLIM_INFINITY and soft <= limit_bytes:
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def _bounded_time() -> Iterator[None]:
    # Only the main thread can handle signals; it is the thread that renders wherever data is prepared or previewed.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.signal(signal.SIGVTALRM, _stop_rendering)
    signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous_handler)


def _stop_rendering(_: int, __: FrameType | None) -> None:
    raise ExceedsBounds(f"it takes more than {_SECONDS:.0f} s of processor time for one record")

"""The presence of the trainer while its messages are awaited.

A receiver whose sender dies in the middle of a message keeps waiting: under Gloo for the whole timeout, under NCCL
until the group is aborted. So its caller stops waiting as soon as its connection to the sender ends.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from threading import Thread


class TrainerGoneError(RuntimeError):
    """The trainer has left in the middle of a message."""


class TrainerPresence:
    """One trainer, which leaves once and never comes back."""

    def __init__(self) -> None:
        self._departure: Future[None] = Future()

    def mark_gone(self) -> None:
        """Note that the trainer has left. May be called from any thread, and more than once."""
        with suppress(InvalidStateError):
            self._departure.set_result(None)

    def wait_for_message(self, receive: Callable[[], None]) -> None:
        """Receive a message; TrainerGoneError where the trainer leaves before it is whole."""
        receipt: Future[None] = Future()
        # Never joined: its message may never come, and the group that it holds cannot end before that.
        Thread(target=_receive_into, args=(receive, receipt), name="weights", daemon=True).start()
        wait({receipt, self._departure}, return_when=FIRST_COMPLETED)
        if not receipt.done():
            raise TrainerGoneError("the trainer has left in the middle of a bucket")
        receipt.result()


def _receive_into(receive: Callable[[], None], receipt: Future[None]) -> None:
    try:
        receive()
    except BaseException as error:  # noqa: BLE001  # it is raised where the message is awaited
        receipt.set_exception(error)
    else:
        receipt.set_result(None)

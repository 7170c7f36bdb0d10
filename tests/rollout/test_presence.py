"""Workers do not wait for a trainer that is dead, wherever in a message it died."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import BroadcastOptions, ProcessGroupGloo

from moejob_api.contract.addresses import LOOPBACK
from moejob_api.contract.pods import weights_key
from moejob_rollout.transfer.channel import open_carrier
from moejob_rollout.transfer.presence import TrainerGoneError, TrainerPresence

KEY = weights_key("secret")
SENDER = Path(__file__).with_name("dying_sender.py")
SIZE = 200_000_000
TRIES = 20


@contextmanager
def joined(most: int) -> Iterator[tuple[ProcessGroupGloo, TrainerPresence]]:
    """The group of a sender that dies when this much has arrived, as a worker joins it."""
    command = [sys.executable, str(SENDER), KEY.hex(), str(SIZE), str(most)]
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}) as sender:
        assert sender.stdout is not None
        presence = TrainerPresence()
        port = open_carrier(LOOPBACK, int(sender.stdout.readline()), KEY, presence.mark_gone)
        store = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
        group = ProcessGroupGloo(store, 1, 2, timedelta(minutes=5))
        yield group, presence
        sender.kill()


def receive(group: ProcessGroupGloo, presence: TrainerPresence) -> Tensor:
    bucket = torch.zeros(SIZE, dtype=torch.uint8)
    options = BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    presence.wait_for_message(lambda: group.broadcast([bucket], options).wait())  # type: ignore[attr-defined]  # untyped
    return bucket


def test_a_message_that_is_whole_is_received() -> None:
    with joined(most=SIZE) as (group, presence):
        assert receive(group, presence).sum() == SIZE


def test_the_rest_of_a_message_is_not_awaited_when_its_sender_is_dead() -> None:
    # On a busy machine a sender may come to die only when all has arrived.
    ends = (end_of_message(most=SIZE // 10) for _ in range(TRIES))
    assert next((end for end in ends if end is not None), "whole each time") == (
        "the trainer has left in the middle of a bucket"
    )


def end_of_message(most: int) -> str | None:
    """Return the error that ended the wait; None for a message that is whole."""
    with joined(most) as (group, presence):
        try:
            receive(group, presence)
        except TrainerGoneError as error:
            return str(error)
    return None


def test_nothing_is_awaited_of_a_trainer_that_has_left() -> None:
    with joined(most=SIZE) as (group, presence):
        presence.mark_gone()
        with pytest.raises(TrainerGoneError):
            receive(group, presence)

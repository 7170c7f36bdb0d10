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

from moejob_api.addresses import LOOPBACK
from moejob_api.contract import weights_key
from moejob_rollout.transfer.channel import carried
from moejob_rollout.transfer.presence import Presence, TrainerGoneError

KEY = weights_key("secret")
SENDER = Path(__file__).with_name("dying_sender.py")
SIZE = 200_000_000


@contextmanager
def joined(most: int) -> Iterator[tuple[ProcessGroupGloo, Presence]]:
    """The group of a sender that dies when this much has arrived, as a worker joins it."""
    command = [sys.executable, str(SENDER), KEY.hex(), str(SIZE), str(most)]
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}) as sender:
        assert sender.stdout is not None
        presence = Presence()
        port = carried(LOOPBACK, int(sender.stdout.readline()), KEY, presence.end)
        store = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
        group = ProcessGroupGloo(store, 1, 2, timedelta(minutes=5))
        yield group, presence
        sender.kill()


def receive(group: ProcessGroupGloo, presence: Presence) -> Tensor:
    bucket = torch.zeros(SIZE, dtype=torch.uint8)
    options = BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    presence.wait_for(lambda: group.broadcast([bucket], options).wait())  # type: ignore[attr-defined]  # untyped
    return bucket


def test_a_message_that_is_whole_is_received() -> None:
    with joined(most=SIZE) as (group, presence):
        assert receive(group, presence).sum() == SIZE


def test_the_rest_of_a_message_is_not_awaited_when_its_sender_is_dead() -> None:
    with joined(most=SIZE // 10) as (group, presence), pytest.raises(TrainerGoneError, match="in the middle"):
        receive(group, presence)


def test_nothing_is_awaited_of_a_trainer_that_has_left() -> None:
    with joined(most=SIZE) as (group, presence):
        presence.end()
        with pytest.raises(TrainerGoneError):
            receive(group, presence)

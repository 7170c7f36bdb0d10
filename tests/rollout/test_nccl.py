"""Weights over NCCL on two GPUs: what arrives, and an end of the wait for a trainer that is dead."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from moejob_api.contract.addresses import LOOPBACK
from moejob_api.contract.pods import Environment, weights_key
from moejob_rollout.transfer.broadcast import BroadcastInit, BroadcastUpdate, NcclTransfer
from moejob_rollout.transfer.presence import TrainerGoneError
from moejob_rollout.transfer.stacks import ExpertStack, StackBuilder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a sender and a receiver take a GPU each"),
]

SECRET, NAME = "secret", "weights"
SENDER = Path(__file__).with_name("nccl_sender.py")
BUCKET = BroadcastUpdate(names=["a"], dtype_names=["float32"], shapes=[[1_000_000]])


class Receiver(NcclTransfer):
    """The transfer of a worker that has no model, and keeps what it receives."""

    def __init__(self) -> None:
        # The rest is vLLM's, and speaks of models.
        self.device = torch.device("cuda", 1)
        self.parallel_config = SimpleNamespace(rank=0)
        self.stacks = StackBuilder()
        self.loaded: list[Tensor] = []

    def load_bucket(self, tensors: Iterable[tuple[str | ExpertStack, Tensor]]) -> None:
        self.loaded += [tensor.cpu() for _, tensor in tensors]


@contextmanager
def joined(buckets: int) -> Iterator[tuple[Receiver, subprocess.Popen[bytes]]]:
    """A receiver, and the trainer that it has joined, which sends this many buckets and then nothing."""
    key, size = weights_key(SECRET), 4 * BUCKET.shapes[0][0]
    command = [sys.executable, str(SENDER), key.hex(), NAME, str(size), str(buckets)]
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}) as sender:
        assert sender.stdout is not None
        receiver = Receiver()
        receiver.init_transfer_engine(BroadcastInit(LOOPBACK, int(sender.stdout.readline()), NAME, 1, 2))
        yield receiver, sender
        sender.kill()


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(Environment.SECRET, SECRET)


def test_a_bucket_is_loaded_as_it_was_sent() -> None:
    with joined(buckets=1) as (receiver, _):
        receiver.receive_weights(BUCKET)
        assert torch.equal(receiver.loaded[0], torch.ones(BUCKET.shapes[0]))


def test_a_gpu_does_not_wait_for_a_trainer_that_is_dead_and_joins_the_next() -> None:
    with joined(buckets=0) as (receiver, sender):
        Timer(2, sender.kill).start()
        with pytest.raises(TrainerGoneError, match="in the middle"):
            receiver.receive_weights(BUCKET)
    torch.cuda.synchronize(receiver.device)
    with joined(buckets=1) as (second, _):
        second.receive_weights(BUCKET)
        assert torch.equal(second.loaded[0], torch.ones(BUCKET.shapes[0]))

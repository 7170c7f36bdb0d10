"""Workers of engines believe a rank 0 that knows a key of the job's secret, and no other."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from moejob_api.contract.addresses import LOOPBACK
from moejob_api.contract.handshake import NONCE_BYTES, PROOF_BYTES
from moejob_api.contract.pods import engine_key, weights_key
from moejob_rollout.transfer.channel import UnprovenPeer, open_carrier
from rollout.doors import opened

KEY = weights_key("secret")


def ignored() -> None:
    """The end of a connection that changes nothing here."""


@pytest.fixture
def store() -> TCPStore:
    return TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5))


def test_a_store_is_reached_after_both_have_proved_the_key(store: TCPStore) -> None:
    port = open_carrier(LOOPBACK, opened(KEY, store.port), KEY, ignored)
    reached = TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(minutes=5))
    store.set("a", "b")
    assert reached.get("a") == b"b"


def test_one_connection_is_carried_and_none_after_it(store: TCPStore) -> None:
    port = open_carrier(LOOPBACK, opened(KEY, store.port), KEY, ignored)
    reached = TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(minutes=5))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, port), timeout=60)
    reached.set("a", "b")
    assert store.get("a") == b"b"


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(weights_key("another secret"), id="another job's"),
        pytest.param(weights_key(""), id="of no secret"),
        pytest.param(engine_key("secret").encode(), id="of engines, which goes over the network"),
    ],
)
def test_a_worker_does_not_join_a_rank_0_with_another_key(store: TCPStore, key: bytes) -> None:
    with pytest.raises(UnprovenPeer, match="do not know one key"):
        open_carrier(LOOPBACK, opened(key, store.port), KEY, ignored)


def test_a_server_that_repeats_what_it_was_sent_is_not_believed() -> None:
    with socket.create_server((LOOPBACK, 0)) as mirror, ThreadPoolExecutor() as threads:
        answer = threads.submit(open_carrier, LOOPBACK, mirror.getsockname()[1], KEY, ignored)
        with mirror.accept()[0] as peer:
            peer.sendall(b"\0" * NONCE_BYTES)
            said = peer.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
            peer.sendall(said[NONCE_BYTES:])
            with pytest.raises(UnprovenPeer, match="its proof is wrong"):
                answer.result(timeout=60)

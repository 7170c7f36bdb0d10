"""A stranger who can connect to a launcher can neither end the job nor make its ranks join another store."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from moejob_api.contract.addresses import LOOPBACK
from moejob_api.contract.pods import ExitCode
from moejob_api.recovery.restarts import FailureCause
from moejob_trainer.launcher.ending import Ending
from moejob_trainer.launcher.store import (
    LauncherStore,
    LostPeers,
    Operation,
    StoreEntries,
    StoreRequest,
)
from moejob_trainer.runtime.channel import FRAME_BYTES, UNPROVED_CONNECTIONS, attempt_key, prove_to_server
from moejob_trainer.runtime.loopback_store import loopback_store
from ports import free_port
from trainer.launcher.launchers import Gang

PATIENCE = timedelta(minutes=5)
KEY = attempt_key("secret", "uid", 2)
BAD_END = Ending(pod=1, token="a stranger", cause=FailureCause.BAD_CONFIGURATION, message="gone for good")


@pytest.fixture
def store() -> LauncherStore:
    return LauncherStore.host_store(LOOPBACK, 0, KEY)


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Gang]:
    gang = Gang(tmp_path, nodes=1, ranks=1)
    yield gang
    gang.close()


def test_a_stranger_cannot_end_a_job(gang: Gang) -> None:
    launcher = gang.start("finish_when_allowed")
    gang.await_start_notes()
    with pytest.raises(RuntimeError):
        TCPStore(LOOPBACK, gang.rendezvous, is_master=False, timeout=timedelta(seconds=3)).compare_set(
            "round/0/end", "", BAD_END.model_dump_json()
        )
    with pytest.raises(LostPeers, match="secret"):
        LauncherStore.join_store(LOOPBACK, gang.rendezvous, attempt_key("a guess", "1234", 1)).put_first(
            "round/0/end", BAD_END.model_dump_json()
        )
    gang.allow("go")
    assert launcher.exit_code() == ExitCode.DONE


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(attempt_key("a guess", "uid", 2), id="another secret"),
        pytest.param(attempt_key("", "uid", 2), id="no secret"),
        pytest.param(attempt_key("secret", "uid", 1), id="an older attempt"),
        pytest.param(attempt_key("secret", "another uid", 2), id="another job"),
    ],
)
def test_ranks_cannot_be_sent_to_a_store_of_a_stranger(store: LauncherStore, key: bytes) -> None:
    with pytest.raises(LostPeers, match="secret"):
        LauncherStore.join_store(LOOPBACK, store.port, key).put_first("round/1/ranks", "6666")
    assert store.get("round/1/ranks") is None


def test_a_launcher_does_not_believe_a_server_that_does_not_know_the_secret() -> None:
    impostor = LauncherStore.host_store(LOOPBACK, 0, attempt_key("a guess", "uid", 2))
    impostor.put_first("round/1/ranks", "6666")
    with pytest.raises(LostPeers, match="secret"):
        LauncherStore.join_store(LOOPBACK, impostor.port, KEY)


def test_a_server_that_repeats_what_it_was_sent_is_not_believed() -> None:
    with socket.create_server((LOOPBACK, 0)) as mirror, ThreadPoolExecutor() as threads:
        answer = threads.submit(LauncherStore.join_store, LOOPBACK, mirror.getsockname()[1], KEY)
        with mirror.accept()[0] as peer:
            peer.sendall(b"\0" * 32)
            peer.sendall(peer.recv(64, socket.MSG_WAITALL)[32:])
            with pytest.raises(LostPeers, match="secret"):
                answer.result(timeout=60)


def test_a_recorded_proof_opens_nothing(store: LauncherStore) -> None:
    recorded = _recorded_proof(store.port)
    with socket.create_connection((LOOPBACK, store.port)) as replayed:
        replayed.recv(32)
        replayed.sendall(recorded)
        assert replayed.recv(32) == b""


def test_the_ranks_store_is_reached_by_who_knows_the_secret_and_on_loopback_alone(store: LauncherStore) -> None:
    ranks = loopback_store(PATIENCE)
    store.reach_ranks(ranks.port)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", ranks.port), timeout=5)
    other = LauncherStore.join_store(LOOPBACK, store.port, KEY)
    reached = TCPStore(LOOPBACK, other.reach_ranks(ranks.port), is_master=False)
    ranks.set("a", "b")
    assert reached.get("a") == b"b"


def test_no_other_port_of_the_pod_is_reached_through_the_store(store: LauncherStore) -> None:
    inner = loopback_store(PATIENCE)
    other = LauncherStore.join_store(LOOPBACK, store.port, KEY)
    with socket.create_connection((LOOPBACK, other.reach_ranks(inner.port))) as refused:
        assert refused.recv(1) == b""


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n" * 40, id="another protocol"),
        pytest.param(b"\xff" * 100_000, id="noise"),
    ],
)
def test_who_proves_nothing_is_closed_and_others_are_answered(store: LauncherStore, said: bytes) -> None:
    with socket.create_connection((LOOPBACK, store.port), timeout=60) as stranger:
        stranger.sendall(said)
        assert LauncherStore.join_store(LOOPBACK, store.port, KEY).add_to_counter("here") == 1
        # The server's nonce, and nothing else.
        assert _until_closed(stranger) <= 32


def test_connections_that_prove_nothing_are_bounded_and_give_way(store: LauncherStore) -> None:
    with ExitStack() as open_ones:
        for _ in range(2 * UNPROVED_CONNECTIONS):
            open_ones.enter_context(socket.create_connection((LOOPBACK, store.port), timeout=60))
        for number in range(1, 9):
            assert _count_of(store.port) == number, "one that knows the key is not turned away"


def test_a_frame_that_says_it_is_huge_is_not_read(store: LauncherStore) -> None:
    async def said_huge() -> bytes:
        reader, writer = await asyncio.open_connection(LOOPBACK, store.port)
        await prove_to_server(reader, writer, KEY)
        writer.write((FRAME_BYTES + 1).to_bytes(4, "big") + b"{")
        received = await reader.read()
        writer.close()
        return received

    assert asyncio.run(said_huge()) == b""
    assert store.add_to_counter("here") == 1


def test_the_store_does_not_grow_without_limit() -> None:
    entries = StoreEntries(limit_bytes=10)
    assert entries.apply_request(StoreRequest(operation=Operation.PUT_FIRST, name="1234", text="567")).text == "567"
    assert entries.apply_request(StoreRequest(operation=Operation.PUT_FIRST, name="1234", text="8" * 100)).text == "567"
    assert entries.apply_request(StoreRequest(operation=Operation.PUT_FIRST, name="abcd", text="e")).refused
    assert entries.apply_request(StoreRequest(operation=Operation.COUNT, name="abcd", number=1)).refused


def test_nobody_listens_where_no_store_is() -> None:
    with pytest.raises(LostPeers, match="does not answer"):
        LauncherStore.join_store(LOOPBACK, free_port(), KEY)


def _recorded_proof(port: int) -> bytes:
    """Return what an honest launcher sends, as one on the way sees it."""
    with socket.create_server((LOOPBACK, 0)) as between, ThreadPoolExecutor() as threads:
        joined = threads.submit(LauncherStore.join_store, LOOPBACK, between.getsockname()[1], KEY)
        with between.accept()[0] as client, socket.create_connection((LOOPBACK, port)) as server:
            client.sendall(server.recv(32, socket.MSG_WAITALL))
            proof = client.recv(64, socket.MSG_WAITALL)
            server.sendall(proof)
            client.sendall(server.recv(32, socket.MSG_WAITALL))
            joined.result(timeout=60)
    return proof


def _count_of(port: int) -> int | None:
    try:
        return LauncherStore.join_store(LOOPBACK, port, KEY).add_to_counter("here")
    except LostPeers:
        return None


def _until_closed(stranger: socket.socket) -> int:
    """Count the bytes that come before the end."""
    received = 0
    try:
        while content := stranger.recv(4096):
            received += len(content)
    except ConnectionResetError:
        pass
    return received

"""Claims on a run folder, by processes that race for it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from moejob_trainer.errors import Superseded
from moejob_trainer.runtime.fencing import Fence, FenceToken, claim_key

KEY = claim_key("secret", "uid")
Act = Callable[[], object] | None


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "claims").iterdir())


def test_the_newest_claim_holds_the_folder(tmp_path: Path) -> None:
    fence = Fence(tmp_path, KEY)
    assert fence.newest_token() is None
    first = fence.acquire(1, 0)
    assert fence.is_ours(first)
    second = fence.acquire(1, 1)
    third = fence.acquire(2, 0)
    assert [fence.is_ours(held) for held in (first, second, third)] == [False, False, True]
    assert fence.newest_token() == third
    assert [fence.newest_token_of(attempt) for attempt in (1, 2, 3)] == [None, third, None]
    assert fence.foreign_names() == []


@pytest.mark.parametrize(
    ("attempt", "restart", "said"),
    [
        pytest.param(1, 9, "belongs to attempt 2, restart 3 now", id="older attempt"),
        pytest.param(2, 2, "belongs to attempt 2, restart 3 now", id="older restart"),
        pytest.param(2, 3, "already used by attempt 2, restart 3", id="the same one again"),
    ],
)
def test_who_is_not_newer_is_refused_and_changes_nothing(tmp_path: Path, attempt: int, restart: int, said: str) -> None:
    fence = Fence(tmp_path, KEY)
    held = fence.acquire(2, 3)
    before = names(tmp_path)
    with pytest.raises(Superseded, match=said):
        fence.acquire(attempt, restart)
    assert fence.is_ours(held)
    assert names(tmp_path) == before
    assert [name.rpartition(".")[0] for name in before] == ["0000000002.0000000003"]


def test_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    fence = Fence(tmp_path, KEY)
    fence.acquire(9, 0)
    tenth = fence.acquire(10, 0)
    assert fence.newest_token() == tenth


PROOF_OF_ANOTHER_NUMBER = Fence(Path(), KEY)._file_name(FenceToken(1, 0)).rpartition(".")[2]  # noqa: SLF001


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("9999999999.9999999999", id="without a proof"),
        pytest.param(f"9999999999.9999999999.{'0' * 64}", id="with a wrong proof"),
        pytest.param(f"9999999999.9999999999.{PROOF_OF_ANOTHER_NUMBER}", id="with the proof of an older claim"),
        pytest.param(Fence(Path(), claim_key("another", "uid"))._file_name(FenceToken(3, 0)), id="of another secret"),  # noqa: SLF001
        pytest.param(Fence(Path(), claim_key("secret", "other"))._file_name(FenceToken(3, 0)), id="of another job"),  # noqa: SLF001
    ],
)
def test_a_foreign_claim_supersedes_no_one_and_is_named(tmp_path: Path, name: str) -> None:
    fence = Fence(tmp_path, KEY)
    held = fence.acquire(1, 0)
    (tmp_path / "claims" / name).touch()
    assert fence.is_ours(held)
    later = fence.acquire(2, 0)
    assert [fence.is_ours(held), fence.is_ours(later)] == [False, True]
    assert fence.foreign_names() == [name]


def test_a_claim_of_before_that_is_put_back_holds_nothing(tmp_path: Path) -> None:
    fence = Fence(tmp_path, KEY)
    fence.acquire(1, 0)
    copied = names(tmp_path)
    later = fence.acquire(2, 0)
    for name in copied:
        (tmp_path / "claims" / name).touch()
    assert fence.is_ours(later)


def test_a_start_before_its_secret_was_lost_commits_nothing_and_starts_no_ranks_again(tmp_path: Path) -> None:
    lost, fence = Fence(tmp_path, claim_key("lost", "uid")), Fence(tmp_path, KEY)
    before = lost.acquire(1, 0)
    later = fence.acquire(2, 0)
    assert [lost.is_ours(before), fence.is_ours(later)] == [False, True]
    with pytest.raises(
        Superseded, match=r"not held by attempt 1, restart 0 any more; attempt 1, restart 1 is too late"
    ):
        lost.acquire(1, 1, before)
    assert fence.is_ours(later)
    assert [name.rpartition(".")[0] for name in names(tmp_path)] == ["0000000002.0000000000"]


class Interrupted(Fence):
    """A fence of which another process gets ahead: before it makes a token, or once it knows which others there are."""

    def __init__(self, folder: Path, key: bytes, *, before_token: Act = None, after_looking: Act = None) -> None:
        super().__init__(folder, key)
        # Frozen, as its base.
        object.__setattr__(self, "acts", {"token": before_token, "looked twice": after_looking})
        object.__setattr__(self, "looks", [])

    def _token_path(self, mine: FenceToken) -> Path:
        self._act("token")
        return super()._token_path(mine)

    def _file_names(self) -> list[str]:
        found = super()._file_names()
        looks: list[list[str]] = self.__dict__["looks"]
        looks.append(found)
        # First whether it is the newest, then for older ones to remove.
        if len(looks) == 2:
            self._act("looked twice")
        return found

    def _act(self, moment: str) -> None:
        acts: dict[str, Act] = self.__dict__["acts"]
        act = acts.pop(moment, None)
        if act is not None:
            act()


def test_a_launcher_that_starts_ranks_again_just_as_the_next_attempt_claims_with_another_secret_is_kept_out(
    tmp_path: Path,
) -> None:
    fence, key = Fence(tmp_path, KEY), claim_key("lost", "uid")
    before = Fence(tmp_path, key).acquire(1, 0)
    lost = Interrupted(tmp_path, key, before_token=lambda: fence.acquire(2, 0))
    with pytest.raises(Superseded, match="attempt 1, restart 1 is too late"):
        lost.acquire(1, 1, before)
    assert fence.is_ours(FenceToken(2, 0))
    assert [name.rpartition(".")[0] for name in names(tmp_path)] == ["0000000002.0000000000"]


def test_a_launcher_that_starts_ranks_again_while_the_next_attempt_removes_its_token_commits_nothing(
    tmp_path: Path,
) -> None:
    lost, again = Fence(tmp_path, claim_key("lost", "uid")), list[FenceToken]()
    before = lost.acquire(1, 0)
    fence = Interrupted(tmp_path, KEY, after_looking=lambda: again.append(lost.acquire(1, 1, before)))
    later = fence.acquire(2, 0)
    assert [lost.is_ours(again[0]), fence.is_ours(later)] == [False, True]


def test_a_first_start_with_a_lost_secret_is_over_when_the_newer_one_commits(tmp_path: Path) -> None:
    """It reads no proof of the newer one, and that one could not remove what was not there."""
    lost, fence = Fence(tmp_path, claim_key("lost", "uid")), Fence(tmp_path, KEY)
    newer = fence.acquire(2, 0)
    older = lost.acquire(1, 0)
    assert fence.is_ours(newer)
    assert not lost.is_ours(older)


def test_a_launcher_starts_its_ranks_again_beside_foreign_claims(tmp_path: Path) -> None:
    fence = Fence(tmp_path, KEY)
    first = fence.acquire(1, 0)
    (tmp_path / "claims/9999999999.9999999999").touch()
    second = fence.acquire(1, 1, first)
    assert [fence.is_ours(held) for held in (first, second)] == [False, True]


def test_claims_are_their_users_alone_also_in_a_folder_that_was_open(tmp_path: Path) -> None:
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims").chmod(0o2777)
    fence = Fence(tmp_path, KEY)
    first = fence.acquire(1, 0)
    assert (tmp_path / "claims").stat().st_mode & 0o7777 == 0o700
    (tmp_path / "claims").chmod(0o755)
    fence.acquire(1, 1, first)
    assert (tmp_path / "claims").stat().st_mode & 0o7777 == 0o700


def test_a_folder_of_claims_whose_mode_cannot_be_changed_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "fchmod", refused)
    fence = Fence(tmp_path, KEY)
    assert fence.is_ours(fence.acquire(1, 0))


def test_no_claim_is_made_and_none_removed_through_a_link(tmp_path: Path) -> None:
    theirs, mine = Fence(tmp_path / "theirs", KEY), Fence(tmp_path / "mine", KEY)
    held = theirs.acquire(1, 0)
    mine.folder.mkdir()
    (mine.folder / "claims").symlink_to("../theirs/claims")
    with pytest.raises(NotADirectoryError):
        mine.acquire(2, 0)
    assert theirs.is_ours(held)


def test_a_rank_knows_its_claim(tmp_path: Path) -> None:
    environ = {
        "MOEJOB_ATTEMPT": "3",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "MOEJOB_UID": "uid",
        "MOEJOB_SECRET": "secret",
        "MOEJOB_RUN_FOLDER": str(tmp_path),
    }
    assert FenceToken.of_rank(environ) == FenceToken(3, 2)
    # As the launcher has written it.
    held = Fence(tmp_path, KEY).acquire(3, 2)
    assert Fence.of_rank(environ).is_ours(held)


def test_of_processes_that_race_only_the_newest_holds_the_folder_in_the_end(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    rounds, racers = 200, 3
    start, end = context.Barrier(racers), context.Barrier(racers)
    pipes = [context.Pipe(duplex=False) for _ in range(racers)]
    processes = [
        context.Process(target=_race, args=(tmp_path, attempt, rounds, (start, end), pipes[attempt][1]))
        for attempt in range(racers)
    ]
    for process in processes:
        process.start()
    outcomes = [pipe.recv() for pipe, _ in pipes]
    for process in processes:
        process.join()
    # However they interleave, the newest attempt got its claim and no other holds the folder afterwards.
    assert outcomes == [[False] * rounds, [False] * rounds, [True] * rounds]


def _race(
    folder: Path, attempt: int, rounds: int, barriers: tuple[Barrier, Barrier], answers: Connection[list[bool], None]
) -> None:
    held = []
    for number in range(rounds):
        barriers[0].wait()
        mine = None
        with suppress(Superseded):
            mine = Fence(folder / str(number), KEY).acquire(attempt, 0)
        barriers[1].wait()
        held.append(mine is not None and Fence(folder / str(number), KEY).is_ours(mine))
    answers.send(held)

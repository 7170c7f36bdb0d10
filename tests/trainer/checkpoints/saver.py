"""A process that saves as fast as it can until it is killed: python saver.py FOLDER ATTEMPT."""

from __future__ import annotations

import sys
from pathlib import Path

from moejob_trainer.checkpoints import CheckpointStore, SingleRank
from moejob_trainer.checkpoints.names import parse_step_folder
from moejob_trainer.runtime.disk import Disk
from trainer.checkpoints.stand_ins import StandInWriting, StateWriter, make_policy, make_run_folder, make_save_request

BLOCKS = 40


class Heavy(StateWriter):
    """A writer whose files take long enough to be killed in."""

    def start_writing(self, folder: Path) -> StandInWriting:
        files = heavy_state(folder.name)
        for name, content in files.items():
            self.disk.write(folder / name, content)
        return StandInWriting(list(files), self.questions)


def heavy_state(folder: str) -> dict[str, bytes]:
    """Return what to write into a folder of this name."""
    assert parse_step_folder(folder) is not None
    return {f"__0_{part}.distcp": f"{folder}/{part} ".encode() * 10_000 for part in range(BLOCKS)}


def main(folder: Path, attempt: int) -> None:
    """Save every step of a run that never ends."""
    where = make_run_folder(folder, attempt, is_ours=lambda: (folder.parent / "owner").read_text() == str(attempt))
    run = CheckpointStore(where, make_policy(keep=3, asynchronous=True), SingleRank(), Heavy(Disk()))
    found = run.start()
    step = 0 if found is None else found.folder.step
    print(f"resumed {None if found is None else found.folder.name}", flush=True)  # noqa: T201 read by the test
    while True:
        step += 1
        run.save(make_save_request(step))
        if (saved := run.wait()) is not None:
            print(f"saved {saved.folder.name}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

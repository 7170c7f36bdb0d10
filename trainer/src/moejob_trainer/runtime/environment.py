"""The environment of a rank, parsed once: the contract's variables and torch's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moejob_api.contract.pods import Environment
from moejob_api.job import Spec
from moejob_trainer.runtime.fencing import Fence, FenceToken

# The port of this pod's loopback at which the store of the ranks answers.
STORE_PORT = "MOEJOB_STORE_PORT"


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """One rank's orders."""

    job: str
    uid: str
    spec: Spec
    folder: Path
    token: FenceToken
    fence: Fence
    rank: int
    world: int
    local_rank: int
    ranks_per_node: int
    # None where no launcher has started the rank.
    store_port: int | None = None


def read_rank_environment(environ: Mapping[str, str] = os.environ) -> RankEnvironment:
    """Read the environment of this process, which a launcher has started as a rank."""
    store_port = environ.get(STORE_PORT)
    # Not validated again: the launcher has parsed the same variables before it started this rank.
    return RankEnvironment(
        job=environ[Environment.JOB],
        uid=environ[Environment.UID],
        spec=Spec.model_validate_json(environ[Environment.SPEC]),
        folder=Path(environ[Environment.RUN_FOLDER]),
        token=FenceToken.of_rank(environ),
        fence=Fence.of_rank(environ),
        rank=int(environ["RANK"]),
        world=int(environ["WORLD_SIZE"]),
        local_rank=int(environ["LOCAL_RANK"]),
        ranks_per_node=int(environ[Environment.RANKS_PER_NODE]),
        store_port=None if store_port is None else int(store_port),
    )

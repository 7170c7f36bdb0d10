"""What a rank was started to do: the contract's environment, parsed once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moejob_api.contract import Environment
from moejob_api.job import Spec
from moejob_trainer.fencing import Claim


@dataclass(frozen=True, slots=True)
class Orders:
    """One rank's orders."""

    job: str
    uid: str
    spec: Spec
    folder: Path
    claim: Claim
    rank: int
    world: int
    local_rank: int
    ranks_per_node: int


def orders(environ: Mapping[str, str] = os.environ) -> Orders:
    """The orders of this process, which a launcher has started as a rank."""
    return Orders(
        job=environ[Environment.JOB],
        uid=environ[Environment.UID],
        spec=Spec.model_validate_json(environ[Environment.SPEC]),
        folder=Path(environ[Environment.RUN_FOLDER]),
        claim=Claim.of_rank(environ),
        rank=int(environ["RANK"]),
        world=int(environ["WORLD_SIZE"]),
        local_rank=int(environ["LOCAL_RANK"]),
        ranks_per_node=int(environ[Environment.RANKS_PER_NODE]),
    )

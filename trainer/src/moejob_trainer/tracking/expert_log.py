"""The load of each expert of each layer, in a file that stays small: a model has too many experts for as many metrics.

The first 127 steps are recorded, then every second one, and with each doubling half as many: 64 steps of every
doubling, some 700 of a run of 100,000. A line has the choices of all experts as compressed numbers, so 58 layers of 256
experts take some 20 kB of it.
"""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path

from moejob_api.contract.pods import RunFile
from moejob_trainer.runtime.disk import Disk, cut_half_line, explain_failure
from moejob_trainer.runtime.fencing import FenceToken
from moejob_trainer.training import ExpertCounts

_STEPS_OF_A_DOUBLING = 7


def is_recorded_step(step: int) -> bool:
    """Return whether the load of a step is recorded; every start of the run gives the same answer."""
    return step % (1 << max(0, step.bit_length() - _STEPS_OF_A_DOUBLING)) == 0


def expert_line(step: int, token: FenceToken, counts: ExpertCounts) -> str:
    """Return the line of a step. Choices are unsigned 32-bit numbers, layer by layer, least byte first."""
    choices = base64.b64encode(zlib.compress(counts.choices.astype("<u4").tobytes())).decode()
    fields = {"step": step, "attempt": token.attempt, "restart": token.restart, "layers": counts.layers}
    fields |= {"experts": counts.choices.shape[1], "expertsPerToken": counts.per_token}
    if counts.disagreement is not None:
        fields["disagreement"] = [round(float(share), 6) for share in counts.disagreement]
    return json.dumps(fields | {"choices": choices}) + "\n"


def append_expert_counts(folder: Path, step: int, token: FenceToken, counts: ExpertCounts) -> None:
    """Add the load of a step to the run folder."""
    path = folder / RunFile.EXPERTS
    with explain_failure("writing the load of experts", path):
        Disk().append(path, expert_line(step, token, counts).encode())


def mend_expert_log(folder: Path) -> None:
    """Cut the half line that a full disk or a loss of power has left."""
    path = folder / RunFile.EXPERTS
    with explain_failure("mending the load of experts", path):
        cut_half_line(Disk(), path)

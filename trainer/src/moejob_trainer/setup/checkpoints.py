"""The checkpoints of a run: state in files, the run folder that holds them, and the fence in front of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from moejob_api.contract import RunPhase
from moejob_api.planner.memory.storage import volume_need
from moejob_trainer.checkpoints import CheckpointStore, RunFolder, RunOwner
from moejob_trainer.checkpoints.adapter_compatibility import adapter_facts
from moejob_trainer.checkpoints.saving import RunCheckpoints, RunWriter, StateFacts
from moejob_trainer.megatron.state import StateFiles
from moejob_trainer.megatron.stored_shards import STATE_FORMAT
from moejob_trainer.model_check.checks import Checks
from moejob_trainer.runtime.heartbeats import Heartbeat, working_heartbeat
from moejob_trainer.setup.context import RankContext
from moejob_trainer.setup.model import RunModel
from moejob_trainer.setup.objective import RunObjective


class WatchedCheckpoints:
    """The checkpoints of a run, whose saves may take longer than a step as long as they move bytes."""

    def __init__(self, checkpoints: RunCheckpoints, heartbeat: Heartbeat) -> None:
        self._checkpoints, self._heartbeat = checkpoints, heartbeat

    def restore(self) -> int:
        """Resume from the newest good checkpoint; the steps done by then, 0 if there is none."""
        self._heartbeat.enter(RunPhase.RESTORING)
        step = self._checkpoints.restore()
        self._heartbeat.enter(RunPhase.FIRST_STEP)
        return step

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step; every rank gets the same answer."""
        return self._checkpoints.is_due(step)

    def save(self, step: int) -> None:
        """Save everything needed to go on after this step."""
        with working_heartbeat(self._heartbeat, step):
            self._checkpoints.save(step)

    def finish(self) -> None:
        """Wait for what is under way: a process that ends would take it along."""
        self._heartbeat.enter(RunPhase.FINISHING)
        self._checkpoints.finish()

    def take_best(self) -> None:
        """Set the weights to those that are exported."""
        self._heartbeat.enter(RunPhase.EXPORTING)
        self._checkpoints.take_best()

    @property
    def writer(self) -> RunWriter:
        """Return the state of the run in files."""
        return self._checkpoints.writer


def build_checkpoints(
    context: RankContext, model: RunModel, state: StateFiles, learned: RunObjective, checks: Checks | None
) -> RunCheckpoints:
    """Build the checkpoints that the loop restores from and saves to; no `checks` where only they have weights."""
    environment, pretrained = context.environment, model.pretrained
    held = adapter_facts(environment.spec, has_weights=pretrained.has_weights)
    writer = RunWriter(state, learned.objective, learned.evaluations, held, is_first=environment.rank == 0)
    place = RunFolder(
        folder=environment.folder,
        run=RunOwner(job=environment.job, uid=environment.uid),
        token=environment.token,
        is_ours=partial(environment.fence.is_ours, environment.token),
    )
    store = CheckpointStore(
        place, environment.spec.checkpoint, context.ranks, writer, measure=learned.evaluations.measure
    )
    need = volume_need(model.architecture.shape, environment.spec).at_least(environment.spec)
    facts = StateFacts(context.layout, STATE_FORMAT, need.checkpoint, need.export)
    return RunCheckpoints(store, writer, facts, _begun(model, checks))


def _begun(model: RunModel, checks: Checks | None) -> Callable[[], None] | None:
    """Return the check of weights to begin with. Those of a checkpoint have been trained since: it has none."""
    if checks is None:
        return _refuse_nothing
    return partial(checks.imported, model.pretrained.folder) if model.pretrained.has_weights else None


def _refuse_nothing() -> None:
    raise RuntimeError(
        "the checkpoint that this run was to resume from is gone; the next start reads the published model"
    )


def last_save(store: CheckpointStore) -> tuple[int | None, float | None, float]:
    """Return the last committed step, the seconds its save took, and those that training waited for it."""
    last = store.last
    return store.last_step, None if last is None else last.seconds, 0.0 if last is None else last.stalled_seconds

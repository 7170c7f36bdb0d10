"""The checkpoints of a run: state in files, the run folder that holds them, and the fence in front of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from moejob_api.planner.memory.storage import volume_need
from moejob_trainer.checkpoints import CheckpointStore, RunFolder, RunOwner
from moejob_trainer.checkpoints.adapter_compatibility import adapter_facts
from moejob_trainer.checkpoints.saving import RunCheckpoints, RunWriter, StateFacts
from moejob_trainer.megatron.state import StateFiles
from moejob_trainer.megatron.stored_shards import STATE_FORMAT
from moejob_trainer.model_check.checks import ModelChecks
from moejob_trainer.runtime.environment import RankEnvironment
from moejob_trainer.runtime.heartbeats import Heartbeat
from moejob_trainer.setup.context import RankContext
from moejob_trainer.setup.model import RunModel
from moejob_trainer.setup.objective import RunObjective


def build_writer(
    environment: RankEnvironment, model: RunModel, state: StateFiles, run_objective: RunObjective
) -> RunWriter:
    """Build the writer of the run's state: the tensors of this rank, and on rank 0 the counters beside them."""
    adapters = adapter_facts(environment.spec, has_weights=model.pretrained.has_weights)
    return RunWriter(
        state, run_objective.objective, run_objective.evaluations, adapters, is_first=environment.rank == 0
    )


def build_checkpoints(
    context: RankContext, model: RunModel, writer: RunWriter, heartbeat: Heartbeat, checks: ModelChecks | None
) -> RunCheckpoints:
    """Build the checkpoints that the loop restores and saves; `checks` is None where only checkpoints have weights."""
    environment = context.environment
    place = RunFolder(
        folder=environment.folder,
        run=RunOwner(job=environment.job, uid=environment.uid),
        token=environment.token,
        is_ours=partial(environment.fence.is_ours, environment.token),
    )
    store = CheckpointStore(
        place, environment.spec.checkpoint, context.ranks, writer, measure=writer.evaluations.measure
    )
    volume = volume_need(model.architecture.shape, environment.spec).least_need(environment.spec)
    facts = StateFacts(context.layout, STATE_FORMAT, volume.checkpoint, volume.export)
    return RunCheckpoints(
        store=store,
        writer=writer,
        state=facts,
        heartbeat=heartbeat,
        on_fresh_start=_initial_check(model, checks),
    )


def _initial_check(model: RunModel, checks: ModelChecks | None) -> Callable[[], None] | None:
    """Return the check of published weights; trained weights of a checkpoint have no reference."""
    # All weights are nan, for a checkpoint was to bring them: no run starts with these.
    if checks is None:
        return _raise_checkpoint_gone
    return partial(checks.check_import, model.pretrained.folder) if model.pretrained.has_weights else None


def _raise_checkpoint_gone() -> None:
    raise RuntimeError(
        "the checkpoint that this run was to resume from is gone; the next start reads the published model"
    )


def last_save_times(store: CheckpointStore) -> tuple[int | None, float | None, float]:
    """Return the last committed step, the seconds of its save, and the seconds that training waited for it."""
    last = store.last_saved
    return store.last_step, None if last is None else last.seconds, 0.0 if last is None else last.stalled_seconds

"""One rank of a run: puts its parts together in the order in which they depend on each other, trains, exports, ends.

The launcher calls `main`; the value it returns is the exit code of the rank. The parts themselves are built in setup/.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from pydantic import TypeAdapter

from moejob_api.contract.pods import ExitCode, RunPhase
from moejob_api.problems import InvalidSpec
from moejob_trainer.checkpoints.saving import RunCheckpoints, background_writer
from moejob_trainer.data.hub import HubPins
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.loop import LoopOutcome, TrainingRun, run_training_loop
from moejob_trainer.megatron.state import StateFiles, saved_parameters
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine
from moejob_trainer.model_check.checks import ModelChecks
from moejob_trainer.runtime.environment import RankEnvironment, read_rank_environment
from moejob_trainer.runtime.heartbeats import BackgroundHeartbeat, Heartbeat, working_heartbeat
from moejob_trainer.runtime.profiling import step_tracer
from moejob_trainer.runtime.start_timing import StartTimer, StartTiming, slowest_start
from moejob_trainer.setup.checkpoints import build_checkpoints, build_writer, last_save_times
from moejob_trainer.setup.context import RankContext, join_ranks
from moejob_trainer.setup.final_export import export_finished_model
from moejob_trainer.setup.model import RunModel, load_model
from moejob_trainer.setup.objective import build_objective, load_inputs
from moejob_trainer.setup.rewards import RunRewards, start_rewards
from moejob_trainer.setup.training_engine import build_training_engine, needs_checkpoint
from moejob_trainer.tracking import TrackedRun, open_tracker
from moejob_trainer.tracking.reporter import ProgressWriter, Reporter, rank_hardware
from moejob_trainer.tracking.signal_log import SignalLog
from moejob_trainer.training import UpdateResult

_START: TypeAdapter[StartTiming | None] = TypeAdapter(StartTiming | None)


@dataclass(frozen=True, slots=True)
class StartSignals:
    """The heartbeat of this rank until it steps, and the time it took to get there."""

    heartbeat: Heartbeat
    background: BackgroundHeartbeat
    timer: StartTimer

    def begin_stepping(self) -> None:
        """Stop the background heartbeat: from now on the steps beat. A second call changes nothing."""
        self.background.stop()
        self.heartbeat.enter_phase(RunPhase.STEPPING)


def main() -> int:
    """The rank's exit code."""
    return run_rank(Heartbeat.for_rank())


def run_rank(heartbeat: Heartbeat) -> int:
    """Run this process as the rank of its environment, and return its exit code."""
    # Until there is something to save, being asked to stop means just that.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.SAVED_AND_STOPPED))
    try:
        return _run_in_world(read_rank_environment(), heartbeat)
    except (BadConfiguration, InvalidSpec) as refusal:
        # The last line a rank writes is what the launcher quotes; libraries that are quoted in it speak in paragraphs.
        sys.stderr.write(f"{' '.join(str(refusal).split())}\n")
        return ExitCode.BAD_CONFIGURATION


def _run_in_world(environment: RankEnvironment, heartbeat: Heartbeat) -> int:
    timer = StartTimer.for_rank()
    heartbeat.enter_phase(RunPhase.JOINING)
    # Until the first step is done, and again while the model is exported, its duration is unknown.
    with working_heartbeat(heartbeat) as background, join_ranks(environment, heartbeat) as context:
        timer.mark_joined()
        with start_rewards(context) as rewards:
            heartbeat.enter_phase(RunPhase.READING_MODEL)
            model = load_model(context)
            heartbeat.enter_phase(RunPhase.PREPARING_DATA)
            outcome = _train_model(context, model, rewards, StartSignals(heartbeat, background, timer))
    return ExitCode.SAVED_AND_STOPPED if outcome is LoopOutcome.PREEMPTED else ExitCode.DONE


def _train_model(
    context: RankContext, model: RunModel, rewards: RunRewards | None, signals: StartSignals
) -> LoopOutcome:
    environment, spec, heartbeat = context.environment, context.spec, signals.heartbeat
    tracked_run = TrackedRun(environment.job, environment.uid, spec, environment.folder, environment.token)
    with ExitStack() as stack:
        tracking = stack.enter_context(open_tracker(tracked_run, is_first=environment.rank == 0))
        writer = ProgressWriter(
            environment.folder, heartbeat, environment.token, tracking, is_first=environment.rank == 0
        )
        inputs = load_inputs(context, model, rewards)
        heartbeat.enter_phase(RunPhase.BUILDING)
        total_steps, is_awaited = inputs.total_steps, needs_checkpoint(context, model)
        engine = build_training_engine(context, model, total_steps, awaits_checkpoint=is_awaited)
        objective_parts = build_objective(context, engine, inputs, rewards, stack)
        objective, evaluations = objective_parts.objective, objective_parts.evaluations
        state = StateFiles(
            engine, saved_parameters(model.table.parameters, spec), stack.enter_context(background_writer())
        )
        checks = ModelChecks(engine, context.layout, context.node, heartbeat.report_share)
        state_writer = build_writer(environment, model, state, objective_parts)
        checkpoints = build_checkpoints(context, model, state_writer, heartbeat, None if is_awaited else checks)
        reporter = Reporter(
            writer,
            total_steps=total_steps,
            ranks=rank_hardware(spec.resources, environment.world),
            saved=lambda: last_save_times(checkpoints.store),
            epoch=objective_parts.epoch,
            waited=objective_parts.waited,
            evaluate=evaluations.evaluate_if_due,
            measured=objective_parts.measured,
            note=SignalLog(spec.grpo).note_step,
            record=objective_parts.record,
            hub_commits=HubPins(environment.folder).list_commits() if writer.is_first else None,
        )

        def begin_steps() -> None:
            # All ranks begin the first step here; the first rank reports how long the slowest took to reach it.
            starts = context.ranks.gather(signals.timer.finish_start(), _START)
            reporter.start(slowest_start([start for start in starts if start is not None]), evaluations.as_fields())

        def report_step(step: int, results: Sequence[UpdateResult]) -> None:
            signals.begin_stepping()
            reporter.report_step(step, results)

        context.stop.listen_for_signals()
        outcome = run_training_loop(
            TrainingRun(
                engine=engine,
                objective=objective,
                checkpoints=checkpoints,
                stop=context.stop,
                total_steps=total_steps,
                report=report_step,
                is_among_best=evaluations.is_among_best,
                is_over=evaluations.is_stopped_early,
                begin_stepping=begin_steps,
                trace_step=step_tracer(environment, context.placement.device),
            )
        )
        with working_heartbeat(heartbeat, evaluations.stopped_at or total_steps):
            checkpoints.finish()
            reporter.report_end(evaluations.stopped_at)
            if outcome is LoopOutcome.COMPLETED and spec.checkpoint.export_hugging_face:
                _export_model(context, model, engine, checkpoints, checks)
        return outcome


def _export_model(
    context: RankContext,
    model: RunModel,
    engine: MegatronTrainingEngine,
    checkpoints: RunCheckpoints,
    checks: ModelChecks,
) -> None:
    checkpoints.load_best_weights()
    is_beside_pretrained = not checkpoints.writer.adapter_facts.holds_weights
    export_finished_model(context, model, engine, checks, is_beside_pretrained=is_beside_pretrained)

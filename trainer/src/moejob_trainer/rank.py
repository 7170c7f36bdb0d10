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
from moejob_trainer.checkpoints.saving import RunCheckpoints, background
from moejob_trainer.data.hub import HubPins
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.loop import LoopOutcome, Run, train
from moejob_trainer.megatron.state import StateFiles, saved_parameters
from moejob_trainer.megatron.training_engine import MegatronEngine
from moejob_trainer.model_check.checks import Checks
from moejob_trainer.runtime.environment import RankEnvironment, rank_environment
from moejob_trainer.runtime.heartbeats import BackgroundHeartbeat, Heartbeat, working_heartbeat
from moejob_trainer.runtime.profiling import step_tracer
from moejob_trainer.runtime.start_timing import StartTimer, StartTiming, slowest
from moejob_trainer.runtime.stopping import AgreedStop
from moejob_trainer.setup.checkpoints import build_checkpoints, build_writer, last_save
from moejob_trainer.setup.context import RankContext, joined
from moejob_trainer.setup.final_export import export_finished_model
from moejob_trainer.setup.model import RunModel, load_model
from moejob_trainer.setup.objective import build_objective, load_inputs
from moejob_trainer.setup.rewards import RunRewards, started_rewards
from moejob_trainer.setup.training_engine import awaits_checkpoint, build_training_engine
from moejob_trainer.tracking import TrackedRun, tracker
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

    def end(self) -> None:
        """Stop the background heartbeat: from now on the steps beat. A second call changes nothing."""
        self.background.stop()
        self.heartbeat.enter(RunPhase.STEPPING)


def main() -> int:
    """The rank's exit code."""
    return run_rank(Heartbeat.for_rank())


def run_rank(heartbeat: Heartbeat) -> int:
    """Run this process as the rank of its environment, and return its exit code."""
    # Until there is something to save, being asked to stop means just that.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.SAVED_AND_STOPPED))
    try:
        return _run(rank_environment(), heartbeat)
    except (BadConfiguration, InvalidSpec) as refused:
        # The last line a rank writes is what the launcher quotes; libraries that are quoted in it speak in paragraphs.
        sys.stderr.write(f"{' '.join(str(refused).split())}\n")
        return ExitCode.BAD_CONFIGURATION


def _run(environment: RankEnvironment, heartbeat: Heartbeat) -> int:
    timer = StartTimer.for_rank()
    heartbeat.enter(RunPhase.JOINING)
    # Until the first step is done, and again while the model is exported, its duration is unknown.
    with working_heartbeat(heartbeat) as background, joined(environment) as context:
        timer.joined()
        with started_rewards(context) as rewards:
            heartbeat.enter(RunPhase.READING_MODEL)
            model = load_model(context)
            heartbeat.enter(RunPhase.PREPARING_DATA)
            outcome = _train(context, model, rewards, StartSignals(heartbeat, background, timer))
    return ExitCode.SAVED_AND_STOPPED if outcome is LoopOutcome.PREEMPTED else ExitCode.DONE


def _train(context: RankContext, model: RunModel, rewards: RunRewards | None, signals: StartSignals) -> LoopOutcome:
    environment, spec, heartbeat = context.environment, context.spec, signals.heartbeat
    tracked = TrackedRun(environment.job, environment.uid, spec, environment.folder, environment.token)
    with ExitStack() as stack:
        tracking = stack.enter_context(tracker(tracked, is_first=environment.rank == 0))
        writer = ProgressWriter(
            environment.folder, heartbeat, environment.token, tracking, is_first=environment.rank == 0
        )
        inputs = load_inputs(context, model, rewards)
        heartbeat.enter(RunPhase.BUILDING)
        total_steps, is_awaited = inputs.total_steps, awaits_checkpoint(context, model)
        engine = build_training_engine(context, model, total_steps, awaits_checkpoint=is_awaited)
        learned = build_objective(context, engine, inputs, rewards, stack)
        objective, evaluations = learned.objective, learned.evaluations
        state = StateFiles(engine, saved_parameters(model.table.parameters, spec), stack.enter_context(background()))
        checks = Checks(engine, context.layout, context.node)
        state_writer = build_writer(context, model, state, learned)
        checkpoints = build_checkpoints(context, model, state_writer, heartbeat, None if is_awaited else checks)
        reporter = Reporter(
            writer,
            total_steps=total_steps,
            ranks=rank_hardware(spec.resources, environment.world),
            saved=lambda: last_save(checkpoints.store),
            epoch=learned.epoch,
            waited=learned.waited,
            evaluate=evaluations.metrics,
            measured=learned.measured,
            note=SignalLog(spec.grpo).note,
            record=learned.record,
            hub_commits=HubPins(environment.folder).commits() if writer.is_first else None,
        )

        def begin() -> None:
            # All ranks begin the first step here; the first rank reports how long the slowest took to reach it.
            starts = context.ranks.gather(signals.timer.begun(), _START)
            reporter.begin(slowest([start for start in starts if start is not None]), evaluations.as_fields())

        def report(step: int, results: Sequence[UpdateResult]) -> None:
            signals.end()
            reporter.report(step, results)

        stop = AgreedStop(context.control)
        stop.listen()
        outcome = train(
            Run(
                engine=engine,
                objective=objective,
                checkpoints=checkpoints,
                stop=stop,
                total_steps=total_steps,
                report=report,
                is_among_best=evaluations.is_among_best,
                is_over=evaluations.is_over,
                begin=begin,
                traced=step_tracer(environment, context.placement.device),
            )
        )
        with working_heartbeat(heartbeat, evaluations.stopped_at or total_steps):
            checkpoints.finish()
            reporter.finish(evaluations.stopped_at)
            if outcome is LoopOutcome.COMPLETED and spec.checkpoint.export_hugging_face:
                _export(context, model, engine, checkpoints, checks)
        return outcome


def _export(
    context: RankContext, model: RunModel, engine: MegatronEngine, checkpoints: RunCheckpoints, checks: Checks
) -> None:
    checkpoints.take_best()
    is_beside_pretrained = not checkpoints.writer.adapter_facts.holds_weights
    export_finished_model(context, model, engine, checks, is_beside_pretrained=is_beside_pretrained)

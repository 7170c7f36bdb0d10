"""One rank of a run: puts the parts together in the order in which they depend on each other, trains, exports, ends.

The launcher calls `main`; what it returns is the exit code of the rank.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from moejob_api.contract import ExitCode, RunFile
from moejob_api.job import Spec
from moejob_api.layout.sizes import Layout, layout
from moejob_api.memory.storage import checkpoint_bytes
from moejob_api.plan import plan
from moejob_api.problems import InvalidSpec
from moejob_trainer.batches import batch_plan
from moejob_trainer.beats import Beats, Pulse
from moejob_trainer.checkpoints import Checkpoints, Place
from moejob_trainer.checkpoints import Run as Owner
from moejob_trainer.checkpoints.disk import explained
from moejob_trainer.checkpoints.ranks import decided
from moejob_trainer.conversion.adapters import AdapterTarget, adapter_table, export_adapters
from moejob_trainer.conversion.export import Target, export, unchecked
from moejob_trainer.conversion.families import Table, table
from moejob_trainer.conversion.imports import opened
from moejob_trainer.data.corpus import Corpus
from moejob_trainer.data.preparation import Recipe, prepare
from moejob_trainer.data.stream import Share, Training, batch_size, draws, evaluation, mixture
from moejob_trainer.devices import control_group, start_device
from moejob_trainer.drawing import DrawnBatches
from moejob_trainer.engine import UpdateResult
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.fencing import is_ours
from moejob_trainer.groups import Groups
from moejob_trainer.inherited import adapted
from moejob_trainer.limits import refuse_what_is_missing
from moejob_trainer.loop import Outcome, Run, train
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.engine import MegatronEngine, Placement
from moejob_trainer.megatron.stages import built
from moejob_trainer.megatron.state import STATE_FORMAT, StateFiles, saved_parameters
from moejob_trainer.megatron.topology import start_groups
from moejob_trainer.megatron.weights import adapter_weights, initialise, load_published, start_adapters, whole_weights
from moejob_trainer.model.architecture import Architecture, architecture, as_trained
from moejob_trainer.objectives.sft import SupervisedFineTuning
from moejob_trainer.orders import Orders, orders
from moejob_trainer.probe.checks import Checks
from moejob_trainer.published import Published, fetch, published
from moejob_trainer.reporting import Reporter, Teller, ranks_of
from moejob_trainer.saving import RunCheckpoints, RunWriter, StateFacts, WorldRanks, background
from moejob_trainer.schedule import learning_rate
from moejob_trainer.starting import Watch, slowest
from moejob_trainer.stopping import AgreedStop
from moejob_trainer.tracking import TrackedRun, tracker

T = TypeVar("T")

EXPORT = RunFile.EXPORT.value
_DATA = "data"


@dataclass(frozen=True, slots=True)
class Here:
    """This rank among the others, and what it computes on."""

    order: Orders
    layout: Layout
    placement: Placement

    @property
    def spec(self) -> Spec:
        """The job."""
        return self.order.spec

    @property
    def node(self) -> int:
        """The number of this rank's pod."""
        return self.order.rank // self.order.ranks_per_node

    @property
    def groups(self) -> Groups:
        """The groups of this rank."""
        return self.placement.groups

    @property
    def control(self) -> dist.ProcessGroup:
        """All ranks, for words and decisions."""
        if self.placement.control is None:
            raise RuntimeError("ranks of a run always have a control group")
        return self.placement.control

    @property
    def ranks(self) -> WorldRanks:
        """All ranks, to agree with."""
        return WorldRanks(self.control)

    def first_decides(self, act: Callable[[], T]) -> T:
        """What the first rank did to the run folder, told to all; its failure is everybody's."""

        def acted() -> T:
            with explained("preparing the run", self.order.folder):
                return act()

        return decided(self.ranks, acted)


@dataclass(frozen=True, slots=True)
class Model:
    """The model of the run: what it computes, and where its weights come from."""

    architecture: Architecture
    published: Published
    table: Table


@dataclass(frozen=True, slots=True)
class Signs:
    """What this rank says of itself until it steps, and how long it took to get there."""

    beats: Beats
    pulse: Pulse
    watch: Watch


def main() -> int:
    """The rank's exit code."""
    # Until there is something to save, being asked to stop means just that.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.SAVED_AND_STOPPED))
    try:
        return _ran(orders())
    except (BadConfiguration, InvalidSpec) as refused:
        # The last line a rank writes is what the launcher quotes; libraries that are quoted in it speak in paragraphs.
        sys.stderr.write(f"{type(refused).__name__}: {' '.join(str(refused).split())}\n")
        return ExitCode.BAD_CONFIGURATION


def _ran(order: Orders) -> int:
    refuse_what_is_missing(order.spec)
    beats, watch = Beats.for_rank(), Watch.for_rank()
    # Until the first step is done, and again while the model is exported, nobody can say how long it takes.
    with Pulse(beats) as pulse, _joined(order) as here:
        watch.joined()
        outcome = _trained(here, _model(here), Signs(beats, pulse, watch))
    return ExitCode.SAVED_AND_STOPPED if outcome is Outcome.PREEMPTED else ExitCode.DONE


@contextmanager
def _joined(order: Orders) -> Iterator[Here]:
    device = start_device(order)
    if device.type == "cpu":
        use_cpu()
    sizes = layout(order.spec.parallelism, order.spec.resources.gpus_per_node)
    groups = start_groups(sizes)
    yield Here(order, sizes, Placement(groups, device, control_group()))
    dist.destroy_process_group()


def _model(here: Here) -> Model:
    spec = here.spec
    # Downloads and files are made once for the volume, not once a rank.
    folder = here.first_decides(lambda: str(fetch(spec.model, here.order.folder)))
    found = published(Path(folder), spec.model)
    model = as_trained(architecture(found.config, f"{folder}/config.json"), spec)
    # The plan has been checked before, unless nobody could look at the model from there.
    if problems := plan(spec, model.shape).problems:
        raise InvalidSpec(problems)
    return Model(model, found, table(model.shape))


def _trained(here: Here, model: Model, signs: Signs) -> Outcome:
    order, spec, beats = here.order, here.spec, signs.beats
    tracked = TrackedRun(order.job, order.uid, spec, order.folder, order.claim)
    with ExitStack() as stack:
        tracking = stack.enter_context(tracker(tracked, is_first=order.rank == 0))
        teller = Teller(order.folder, beats, order.claim, tracking, is_first=order.rank == 0)
        training, evaluated = _data(here, model)
        share = Share(batch_plan(spec, here.layout, pad_token=0), here.groups.data.rank)
        source = DrawnBatches(training, share)
        stack.callback(source.close)
        objective = SupervisedFineTuning(source)
        total_steps = spec.training.max_steps or training.steps()
        engine = _engine(here, model, total_steps)
        state = StateFiles(engine, saved_parameters(model.table.parameters, spec), stack.enter_context(background()))
        checks = Checks(engine, here.layout, here.node)
        checkpoints = _checkpoints(here, model, state, objective, checks)

        def evaluate(step: int) -> Mapping[str, float]:
            if not evaluated or not _evaluates(spec, step, total_steps):
                return {}
            return _evaluation(engine, objective, evaluated, spec, share)

        reporter = Reporter(
            teller,
            total_steps=total_steps,
            ranks=ranks_of(spec.resources, order.world),
            saved=lambda: _saved(checkpoints.store),
            epoch=lambda: source.epoch,
            waited=source.waited_seconds,
            evaluate=evaluate,
        )

        def report(step: int, results: Sequence[UpdateResult]) -> None:
            signs.pulse.stop()
            reporter.report(step, results)

        stop = AgreedStop(here.control)
        stop.listen()
        begin = partial(_begin, here, reporter, signs.watch)
        outcome = train(Run(engine, objective, checkpoints, stop, total_steps, report, begin))
        with Pulse(beats, total_steps):
            checkpoints.finish()
            reporter.finish()
            if outcome is Outcome.COMPLETED and spec.checkpoint.export_hugging_face:
                _export(here, model, engine, checks, is_beside_published=not checkpoints.writer.adapted.holds_weights)
        return outcome


def _begin(here: Here, reporter: Reporter, watch: Watch) -> None:
    """The first step begins, at all ranks. The first of them tells how all came to it."""
    starts = here.ranks.gathered(watch.begun())
    reporter.begin(slowest([start for start in starts if start is not None]))


def _data(here: Here, model: Model) -> tuple[Training, list[Corpus]]:
    data, spec = here.spec.data, here.spec
    recipe = Recipe(spec.model, data, vocabulary=model.architecture.shape.vocabulary)
    folder = here.order.folder / _DATA
    named = here.first_decides(
        lambda: tuple(map(str, prepare([*data.train, *data.eval], recipe, folder, workers=here.order.ranks_per_node)))
    )
    corpora = [Corpus(Path(path)) for path in named]
    train_corpora, eval_corpora = corpora[: len(data.train)], corpora[len(data.train) :]
    mixed = mixture(train_corpora, data)
    return Training(train_corpora, mixed, batch_size(spec), draws(mixed, spec.training.epochs)), eval_corpora


def _engine(here: Here, model: Model, total_steps: int) -> MegatronEngine:
    spec, device = here.spec, here.placement.device
    stages = built(model.architecture, spec, here.layout, here.groups, device)
    if model.published.has_weights:
        load_published(stages, opened(model.published.folder, model.table), here.groups)
    else:
        initialise(stages, model.table.parameters, here.groups, spec.training.seed)
    if spec.training.lora is not None:
        declared = adapter_table(model.architecture.shape, spec.training.lora).parameters
        start_adapters(stages, declared, here.groups, spec.training.seed)
    training = spec.training

    def rate(update: int) -> float:
        return learning_rate(update, total_steps, training.optimizer, training.scheduler)

    return MegatronEngine(model.architecture, spec, stages, here.placement, rate)


def _checkpoints(
    here: Here, model: Model, state: StateFiles, objective: SupervisedFineTuning, checks: Checks
) -> RunCheckpoints:
    order, published = here.order, model.published
    held = adapted(order.spec, has_weights=published.has_weights)
    writer = RunWriter(state, objective, held, is_first=order.rank == 0)
    place = Place(
        folder=order.folder,
        run=Owner(job=order.job, uid=order.uid),
        claim=order.claim,
        is_ours=lambda: is_ours(order.folder, order.claim),
    )
    store = Checkpoints(place, order.spec.checkpoint, here.ranks, writer)
    facts = StateFacts(here.layout, STATE_FORMAT, checkpoint_bytes(model.architecture.shape, order.spec))
    # What a checkpoint holds has been trained since: there is nothing to compare it with.
    begun = partial(checks.imported, published.folder) if published.has_weights else None
    return RunCheckpoints(store, writer, facts, begun)


def _evaluates(spec: Spec, step: int, total_steps: int) -> bool:
    every = spec.training.eval_every
    return step == total_steps or (every is not None and step % every == 0)


def _evaluation(
    engine: MegatronEngine, objective: SupervisedFineTuning, corpora: list[Corpus], spec: Spec, share: Share
) -> Mapping[str, float]:
    """The loss over the whole evaluation data: each batch counts as much as the weight it carries."""
    total = weight = 0.0
    for batch in evaluation(corpora, batch_size(spec), share):
        result = engine.evaluated(batch.micro_batches, objective.loss)
        total += result.loss * batch.loss_weight
        weight += batch.loss_weight
    return {"evalLoss": total / weight}


def _saved(store: Checkpoints) -> tuple[int | None, float | None, float]:
    last = store.last
    return store.last_step, None if last is None else last.seconds, 0.0 if last is None else last.stalled_seconds


def _export(here: Here, model: Model, engine: MegatronEngine, checks: Checks, *, is_beside_published: bool) -> None:
    folder, groups, lora = here.order.folder / EXPORT, here.placement.model_groups, here.spec.training.lora
    published = model.published.folder
    with explained("exporting", folder):
        if lora is None:
            target = Target(folder, published, getattr(torch, here.spec.model.dtype.value))
            export(whole_weights(engine.stages), model.table, groups, target, checks.exported)
            return
        adapters, declared = adapter_weights(engine.stages), adapter_table(model.architecture.shape, lora)
        # On weights that have never been published, or that another job has trained since, there is nothing to read.
        check = unchecked
        if model.published.has_weights and is_beside_published:
            check = partial(checks.exported_adapters, base=published, scale=lora.alpha / lora.rank)
        export_adapters(adapters, declared, groups, AdapterTarget(folder, here.spec.model.source, lora), check)

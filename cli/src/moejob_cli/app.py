"""The commands of `moejob`. Each reads its input, asks moejob_api and prints the result.

Annotations are not imported from __future__: they would be text, which typer evaluates four times for every command.
"""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from moejob_cli.cluster.commands import verbs
from moejob_cli.exits import CommandExit
from moejob_cli.model_commands import model_commands
from moejob_cli.option_types import (
    ContextOption,
    NamespaceOption,
    OutputFormat,
    OutputOption,
    SetOption,
    SweepOption,
)
from moejob_cli.options import LazyCommands
from moejob_cli.printing import print_document, print_report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moejob_api.problems import Problem
    from moejob_cli.choosing import LayoutRequest
    from moejob_cli.inputs import PlannedJob
    from moejob_cli.interchange import Conversion
    from moejob_cli.obstacles import JobObstacle
    from moejob_cli.running.supervision import RunResult
    from moejob_client.jobs import AsyncClient

app = typer.Typer(
    name="moejob",
    cls=LazyCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class ForeignFormat(StrEnum):
    """A foreign format from which models are converted."""

    MEGATRON = "megatron"


class ModelFormat(StrEnum):
    """The format of an exported model."""

    SAFETENSORS = "safetensors"
    MEGATRON = "megatron"


class WeightType(StrEnum):
    """The type that weights are written in."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


GpusOption = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        min=1,
        max=1_048_576,
        help="Trainer GPUs there are, with --auto separate engines' too. A layout for another number is refused.",
    ),
]
GpuTypeOption = Annotated[
    str | None, typer.Option("--gpu-type", help="With --auto: plan for this GPU (A100, H100, H200, B200).")
]


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        version()
        raise typer.Exit


@app.callback()
def moejob(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Plan and run MoETrainingJobs: large Mixture-of-Experts training from one YAML."""


@app.command(short_help="Check jobs, each in one line.")
def validate(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Jobs to check.", show_default=False)],
    settings: SetOption = None,
) -> None:
    """Check jobs and say what is wrong with them, and what in them does nothing: one line each."""
    raise typer.Exit(max(_validate_file(file, settings or ()) for file in files))


def _validate_file(file: str, settings: "Sequence[str]") -> CommandExit:
    """Check one job; an unreadable job is reported, so that the next ones are still checked."""
    from moejob_api.problems import InvalidSpec
    from moejob_cli.inputs import plan_file
    from moejob_cli.local_files import unreadable_sources

    try:
        answer = plan_file(file, settings)
    except InvalidSpec as error:
        for problem in error.problems:
            typer.echo(f"error: {_add_file_name(file, str(problem))}", err=True)
        print_hint(error.problems)
        return CommandExit.UNREADABLE
    for problem in answer.plan.problems:
        typer.echo(f"{file}: {problem}")
    for warning in answer.plan.warnings:
        typer.echo(f"{file}: note {warning}")
    for reason in unreadable_sources(answer.job.spec):
        typer.echo(f"{file}: not here: {reason}")
    if not answer.plan.is_accepted:
        print_hint(answer.plan.problems)
        return CommandExit.REFUSED
    typer.echo(f"{file}: accepted" + (f" (model not checked: {answer.unseen})" if answer.unseen else ""))
    return CommandExit.ACCEPTED


def _add_file_name(file: str, text: str) -> str:
    """Put the file's name in front of a problem that does not contain it."""
    return text if file in text else f"{file}: {text}"


@app.command("explain", short_help="Say what a field of a job takes.")
def explain_field(
    field: Annotated[
        str,
        typer.Argument(metavar="[FIELD]", help="As training.maxSteps; or another trainer's name, as lr."),
    ] = "spec",
) -> None:
    """Say what a field of a job means and takes, its default, and the fields in it; other trainers' names are known."""
    from moejob_cli import field_docs

    typer.echo(field_docs.explain_field(field))


def print_hint(problems: "Sequence[Problem]") -> None:
    """Lead from a refusal to the field that it is about."""
    if not problems:
        return
    from moejob_cli.field_docs import explain_hint

    hint = explain_hint(problems)
    if hint is not None:
        typer.echo(hint, err=True)


@app.command(short_help="Say what a job takes, or why it is refused.")
def plan(
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="A job's YAML, or - for standard input.", show_default=False)
    ] = None,
    output: OutputOption = OutputFormat.TABLE,
    settings: SetOption = None,
    profile: Annotated[
        str | None,
        typer.Option("--profile", metavar="FILE", help="YAML of the job's profile; its values are merged and shown."),
    ] = None,
    gpus: GpusOption = None,
    ranks: Annotated[bool, typer.Option("--ranks", help="List every rank, however many there are.")] = False,
    pods: Annotated[
        bool, typer.Option("--pods", help="Print the first pod of each role as YAML, as the operator would create it.")
    ] = False,
    auto: Annotated[bool, typer.Option("--auto", help="Choose the layout: the five fastest that fit.")] = False,
    write: Annotated[
        Path | None, typer.Option("--write", help="With --auto: write the job with the best layout to this new file.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="With --auto and without FILE: the model.")] = None,
    method: Annotated[str, typer.Option("--method", help="With --model: SFT or GRPO.")] = "SFT",
    gpu_type: GpuTypeOption = None,
    max_length: Annotated[
        int, typer.Option("--max-length", min=1, help="With --model: tokens of the longest sequence.")
    ] = 4096,
    global_batch: Annotated[
        int, typer.Option("--global-batch", min=1, help="With --model: sequences of one update.")
    ] = 256,
    tflops: Annotated[
        float | None, typer.Option("--tflops", min=1, help="With --auto: bf16 peak of a GPU in TFLOP/s.")
    ] = None,
    nvlink: Annotated[
        float | None, typer.Option("--nvlink", min=0.1, help="With --auto: GB/s of a GPU inside a node, one direction.")
    ] = None,
    network: Annotated[
        float | None,
        typer.Option("--network", min=0.1, help="With --auto: GB/s of a GPU between nodes, one direction."),
    ] = None,
) -> None:
    """Say what a job takes: GPUs, nodes, ranks, memory; or why it is refused and what would be accepted."""
    auto_options = {"--write": write, "--model": model, "--gpu-type": gpu_type, "--tflops": tflops}
    auto_options |= {"--nvlink": nvlink, "--network": network}
    given_options = [name for name, value in auto_options.items() if value is not None]
    if auto and profile is not None:
        raise typer.BadParameter(
            "has no meaning with --auto: write the profile's GPUs into the job", param_hint="--profile"
        )
    if auto and pods:
        raise typer.BadParameter("has no meaning with --auto", param_hint="--pods")
    if auto:
        from moejob_cli.choosing import GpuSpeeds, LayoutRequest

        speeds = GpuSpeeds(tflops, nvlink, network)
        wishes = LayoutRequest(file, model, method, gpu_type, gpus, max_length, global_batch, speeds, settings or ())
        _choose_layout(wishes, output, write)
    elif given_options:
        raise typer.BadParameter("has a meaning only with --auto", param_hint=given_options[0])
    elif file is None:
        raise typer.BadParameter("name a job's YAML, or use --auto with --model", param_hint="FILE")
    else:
        from moejob_cli.inputs import plan_file

        if profile is None:
            answer = plan_file(file, settings or (), gpus)
        else:
            from moejob_cli.profiled_plans import plan_with_profile

            answer = plan_with_profile(file, profile, settings or (), gpus)
        if pods and answer.plan.is_accepted:
            from moejob_cli.pods_report import pods_text

            typer.echo(pods_text(answer), nl=False)
            return
        _show_plan(answer, output, ranks)


def _show_plan(answer: "PlannedJob", output: OutputFormat, ranks: bool) -> NoReturn:
    if output is OutputFormat.TABLE:
        from moejob_cli.report import plan_report

        print_report(plan_report(answer, ranks))
        print_hint(answer.plan.problems)
    else:
        from moejob_cli.document import plan_document

        print_document(plan_document(answer.plan, answer.profile), output)
    raise typer.Exit(CommandExit.ACCEPTED if answer.plan.is_accepted else CommandExit.REFUSED)


def _choose_layout(wishes: "LayoutRequest", output: OutputFormat, write: Path | None) -> None:
    from moejob_cli.choices_report import choices_report
    from moejob_cli.choosing import choices_document, choose_layouts, write_job

    layouts = choose_layouts(wishes)
    if output is OutputFormat.TABLE:
        print_report(choices_report(layouts))
    else:
        print_document(choices_document(layouts), output)
    if not layouts.choices:
        raise typer.Exit(CommandExit.REFUSED)
    if write is not None:
        write_job(layouts, write)
        typer.echo(f"wrote {write}", err=True)


@app.command(short_help="Train on this machine; run again to resume.")
def run(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A job's YAML, or - for standard input.", show_default=False)
    ],
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir",
            help="Folder of the run: used again, the run continues. Default: runs/NAME. Of a sweep: the folder of "
            "its runs. Default: runs.",
        ),
    ] = None,
    settings: SweepOption = None,
) -> None:
    """Train on this machine, each node simulated, as the job would in a cluster. Ctrl-C saves; run again to go on."""
    from moejob_cli.inputs import plan_file, plan_swept_jobs
    from moejob_cli.sweeps import is_sweep

    if not is_sweep(settings or ()):
        answer = plan_file(file, settings or ())
        _require_accepted([answer])
        raise typer.Exit(_train_here(answer, run_dir).exit_code)
    from moejob_cli.running.command import RUNS
    from moejob_cli.sweeps import overlay_words

    answers = plan_swept_jobs(file, settings or ())
    _require_accepted(answers)
    folders = [(run_dir or RUNS) / answer.job.metadata.name for answer in answers]
    exit_code = 0
    for number, (answer, folder) in enumerate(zip(answers, folders, strict=True), 1):
        typer.echo(f"run {number} of {len(answers)}: {folder}", err=True)
        result = _train_here(answer, folder)
        # A run that fails says something about its values, and the others are wanted all the same.
        exit_code = exit_code or result.exit_code
        if result.is_as_asked:
            raise typer.Exit(exit_code)
    typer.echo(overlay_words("moejob board", folders), err=True)
    raise typer.Exit(exit_code)


def _require_accepted(answers: "Sequence[PlannedJob]") -> None:
    """Show the plan of the first job that is refused, and end."""
    refused = next((answer for answer in answers if not answer.plan.is_accepted), None)
    if refused is None:
        return
    from moejob_cli.report import plan_report

    print_report(plan_report(refused, all_ranks=False))
    print_hint(refused.plan.problems)
    raise typer.Exit(CommandExit.REFUSED)


def _train_here(answer: "PlannedJob", run_dir: Path | None) -> "RunResult":
    """Train an accepted job on this machine to its end, and print how it ended."""
    from moejob_cli.running import command, display

    result, lines, folder = command.run_job(answer, run_dir, display.choose_display())
    if lines:
        print_report(display.closing_lines(lines, folder, answer.job.spec.grpo))
    if result.exit_code:
        typer.echo(result.message if result.is_as_asked else f"error: {result.message}", err=True)
    return result


@app.command("demo", short_help="Train a tiny model here, then ask it something.")
def run_demo(
    run_dir: Annotated[
        Path, typer.Option("--run-dir", help="Folder of the run; an earlier demo in it is removed.")
    ] = Path("runs/demo"),
    wheels: Annotated[
        Path | None,
        typer.Option("--wheels", help="Install the trainer from the wheels in this folder, not from the index."),
    ] = None,
) -> None:
    """Train the tiny example on two CPU ranks, then ask its model. The first time this installs the trainer (5 GB)."""
    from moejob_api.contract.pods import ExitCode
    from moejob_cli.inputs import plan_file
    from moejob_cli.running import demo
    from moejob_cli.running.machine import CannotRun

    try:
        python = demo.prepare_trainer(wheels)
        demo.clear_run_folder(run_dir)
        exit_code = _train_here(plan_file(str(demo.JOB)), run_dir).exit_code
        if exit_code:
            raise typer.Exit(exit_code)
        typer.echo("\n" + demo.ask_model(python, run_dir), nl=False)
    except CannotRun as refused:
        typer.echo(f"error: {refused}", err=True)
        raise typer.Exit(ExitCode.BAD_CONFIGURATION) from None


@app.command("why", short_help="Say why a job does not train.")
def explain_jobs(
    jobs: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB|FILE...",
            help="Jobs of the cluster, @latest the newest; or files of what "
            "`kubectl get moetrainingjobs,pods,pvc,events -o json` prints, - for standard input.",
            show_default=False,
        ),
    ],
    output: OutputOption = OutputFormat.TABLE,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Say why jobs do not train: what is in the way and since when, what follows by itself, and the fix."""
    from datetime import UTC, datetime

    from moejob_cli.obstacles import find_obstacles, is_file_name, read_objects

    if any(is_file_name(name) for name in jobs):
        _show_obstacles(find_obstacles(read_objects(jobs), datetime.now(UTC)), output)
    from moejob_cli.cluster.jobs import ClusterChoice, find_cluster_obstacles, run_verb

    async def explain_named(client: "AsyncClient") -> CommandExit:
        _show_obstacles(await find_cluster_obstacles(client, jobs), output)

    raise typer.Exit(run_verb(ClusterChoice(namespace, context), explain_named))


def _show_obstacles(obstacles: "Sequence[JobObstacle]", output: OutputFormat) -> NoReturn:
    from moejob_cli.obstacles import obstacle_document, obstacle_lines

    if output is OutputFormat.TABLE:
        for obstacle in obstacles:
            typer.echo("\n".join(obstacle_lines(obstacle)))
    else:
        print_document({"jobs": [obstacle_document(obstacle) for obstacle in obstacles]}, output)
    has_obstacle = any(obstacle.diagnosis is not None for obstacle in obstacles)
    raise typer.Exit(CommandExit.REFUSED if has_obstacle else CommandExit.ACCEPTED)


@app.command("board", short_help="Show runs in the browser.")
def serve_runs(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUNS...]", help="Run folders, or folders of them. Default: runs.", show_default=False),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = 8265,
) -> None:
    """Show curves, failures, answers and layout of runs in the browser, from their files alone; Ctrl-C ends it."""
    from moejob_cli.board.commands import serve_board

    try:
        server = serve_board(runs or [], port)
    except OSError as error:
        typer.echo(f"error: port {port} cannot be used: {error.strerror}; name another one with --port", err=True)
        raise typer.Exit(CommandExit.REFUSED) from None
    # Runs that are named one by one are to be seen beside each other.
    typer.echo(server.overlay_url if len(runs or ()) > 1 else server.url)
    with server:
        server.serve_forever()


@app.command("report", short_help="Write the page of a run as one file.")
def write_run_report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.", show_default=False)],
    html: Annotated[Path, typer.Option("--html", help="The file to write, for any browser and without a server.")],
) -> None:
    """Write curves, failures, answers and layout of runs as one HTML file, which loads nothing from elsewhere."""
    from moejob_cli.board.commands import write_report

    try:
        size = write_report(runs, html)
    except OSError as error:
        typer.echo(f"error: {html} cannot be written: {error.strerror}", err=True)
        raise typer.Exit(CommandExit.REFUSED) from None
    typer.echo(f"wrote {html} ({size / 1e6:.1f} MB)", err=True)


@app.command("data", short_help="Show what the model will see of the data.")
def preview_data(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A job's YAML, or - for standard input.", show_default=False)
    ],
    examples: Annotated[int, typer.Option("--examples", min=0, help="Examples to show of each data set.")] = 2,
    records: Annotated[
        int, typer.Option("--records", min=1, help="Records to read and count of each data set.")
    ] = 1000,
    output: Annotated[
        OutputFormat, typer.Option("--output", "-o", help="How to print the answer.")
    ] = OutputFormat.TABLE,
    settings: SetOption = None,
) -> None:
    """Show what the model will see of a job's data: trained tokens marked, counts, lengths, what is dropped and why."""
    from moejob_api.contract.data_preview import PreviewLimits
    from moejob_api.contract.pods import ExitCode, escaped_lines
    from moejob_cli.data_preview import PreviewFailure, preview_file
    from moejob_cli.running.machine import CannotRun

    try:
        preview = preview_file(file, PreviewLimits(records, examples), settings or ())
    except CannotRun as refused:
        typer.echo(f"error: {refused}", err=True)
        raise typer.Exit(ExitCode.BAD_CONFIGURATION) from None
    if isinstance(preview, PreviewFailure):
        typer.echo(f"error: {escaped_lines(preview.message)}", err=True)
        raise typer.Exit(preview.exit_code)
    if output is OutputFormat.TABLE:
        from moejob_cli.data_report import data_report

        print_report(data_report(preview))
    else:
        print_document(preview.model_dump(mode="json", by_alias=True), output)


@app.command("import", short_help="Take a checkpoint of Megatron as a model.")
def import_model(
    checkpoint: Annotated[Path, typer.Argument(metavar="PATH", help="A torch_dist checkpoint.", show_default=False)],
    config: Annotated[
        Path, typer.Option("--config", help="Folder with the config.json and the tokenizer of its model.")
    ],
    out: Annotated[Path, typer.Option("--out", help="New folder for the model, in Hugging Face's format.")],
    source: Annotated[ForeignFormat, typer.Option("--from", help="The format it has.")] = ForeignFormat.MEGATRON,
) -> None:
    """Convert a checkpoint of others into a folder that spec.model.source can name."""
    from moejob_cli.interchange import run_conversion

    del source
    _finish_conversion(run_conversion(["import", checkpoint, "--config", config, "--out", out]))


@app.command("export", short_help="Take the model out of a run.")
def export_model(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|JOB",
            help="Folder of a run, finished or not, or of a model; a job of the cluster, @latest the newest.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="New folder for the model.")],
    target: Annotated[ModelFormat, typer.Option("--to", help="The format it gets.")] = ModelFormat.SAFETENSORS,
    step: Annotated[
        str | None,
        typer.Option(
            "--step",
            metavar="N|best",
            help="The checkpoint to take: of a step, or of the best evaluation (checkpoint.keepBest). "
            "Default: the newest.",
        ),
    ] = None,
    merge_adapters: Annotated[
        bool, typer.Option("--merge-adapters", help="Add adapters to the weights that they were trained beside.")
    ] = False,
    dtype: Annotated[
        WeightType | None, typer.Option("--dtype", help="Type of the weights. Default: the job's model.dtype.")
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option("--base", help="With --merge-adapters: the published weights. Default: the job's model.source."),
    ] = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Export a checkpoint of a run as a Hugging Face model or a Megatron checkpoint; or fetch the export of a job."""
    from moejob_cli.job_names import is_job_name

    if is_job_name(run):
        chosen_options = {"--step": step, "--dtype": dtype, "--base": base, "--merge-adapters": merge_adapters or None}
        _refuse_options(run, [name for name, value in chosen_options.items() if value is not None])
        _fetch_export(str(run), out, target, namespace, context)
    from moejob_cli.interchange import CheckpointChoice, export_checkpoint, export_to_megatron

    if base is not None and not merge_adapters:
        raise typer.BadParameter("has a meaning only with --merge-adapters", param_hint="--base")
    if step is not None and step != "best" and not (step.isascii() and step.isdigit()):
        raise typer.BadParameter(f"{step!r} is no step; give a number, or best", param_hint="--step")
    choice = CheckpointChoice(step, merge_adapters, dtype, base)
    export = export_checkpoint if target is ModelFormat.SAFETENSORS else export_to_megatron
    _finish_conversion(export(run, out, choice))


def _refuse_options(run: Path, options: "Sequence[str]") -> None:
    """Refuse options for a folder of this machine where a job is named."""
    if options:
        fix = f"{run} is no folder here; copy its checkpoints first: `moejob cp {run} . FOLDER`"
        raise typer.BadParameter(f"has a meaning only for a run folder, and {fix}", param_hint=options[0])


def _fetch_export(name: str, out: Path, target: ModelFormat, namespace: str | None, context: str | None) -> NoReturn:
    from moejob_cli.cluster.files import fetch_export
    from moejob_cli.cluster.jobs import ClusterChoice, run_verb

    is_megatron = target is ModelFormat.MEGATRON
    choice = ClusterChoice(namespace, context)
    raise typer.Exit(run_verb(choice, lambda client: fetch_export(client, name, out, to_megatron=is_megatron)))


def _finish_conversion(conversion: "Conversion") -> NoReturn:
    """Print the end of a conversion, and exit with its code."""
    from moejob_api.contract.pods import escaped_lines

    message = escaped_lines(conversion.message)
    typer.echo(f"error: {message}" if conversion.exit_code else message, err=bool(conversion.exit_code))
    raise typer.Exit(conversion.exit_code)


@app.command(short_help="Print every field as a CustomResourceDefinition.")
def schema() -> None:
    """Print the CustomResourceDefinition that describes every field of a job."""
    from moejob_api.crd.__main__ import crd_text

    sys.stdout.write(crd_text())


@app.command(short_help="Print the version.")
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    typer.echo(f"moejob {installed('moejob')}")


app.add_typer(model_commands)
# Behind the commands of this machine.
app.add_typer(verbs)

"""The commands on jobs of a cluster. Each takes its options, and lets a module of this room do the work.

Annotations are not imported from __future__: they would be text, which typer evaluates four times for every command.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from moejob_cli.exits import CommandExit
from moejob_cli.option_types import (
    ContextOption,
    JobArgument,
    NamespaceOption,
    OutputFormat,
    OutputOption,
    RunOrJobArgument,
    SweepOption,
)
from moejob_cli.printing import print_document, print_report

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from moejob_cli.board.run_files import RunFiles
    from moejob_client.jobs import AsyncClient

_LEAST_COMPARED = 2

verbs = typer.Typer()


@verbs.command("get", short_help="List jobs of the cluster.")
def get_jobs(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[JOB...]", help="Jobs, @latest the newest. Default: all.")
    ] = None,
    output: OutputOption = OutputFormat.TABLE,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """List jobs of a namespace: phase, step, loss, speed, what is left, and what is in the way."""
    from datetime import UTC, datetime

    from moejob_cli.cluster.jobs import ClusterChoice, job_table, list_named_jobs, run_verb

    async def show_jobs(client: "AsyncClient") -> CommandExit:
        views = await list_named_jobs(client, names or ())
        if output is OutputFormat.TABLE:
            typer.echo("\n".join(job_table(views, datetime.now(UTC))))
        else:
            print_document({"jobs": [view.body for view in views]}, output)
        return CommandExit.ACCEPTED

    raise typer.Exit(run_verb(ClusterChoice(namespace, context), show_jobs))


@verbs.command("watch", short_help="Follow jobs of the cluster.")
def watch_jobs(
    name: Annotated[str, typer.Argument(metavar="[JOB]", help="A job, @latest the newest. Default: all.")] = "",
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Print a line for each change of a job until it has finished, exit 0 if it succeeded; or of all jobs for ever."""
    from moejob_cli.cluster.jobs import ClusterChoice, follow_jobs, run_verb

    raise typer.Exit(run_verb(ClusterChoice(namespace, context), lambda client: follow_jobs(client, name)))


@verbs.command("logs", short_help="Print the logs of a job's pods.")
def print_logs(
    name: JobArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for pods, go on with later ones, and end with the job.")
    ] = False,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Lines of this rank alone.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Lines of what the last failure is blamed on.")] = False,
    node: Annotated[str | None, typer.Option("--node", help="Pods of this node alone.")] = None,
    since: Annotated[str | None, typer.Option("--since", metavar="AGE", help="No older lines: 90s, 10m, 2h.")] = None,
    attempt: Annotated[int | None, typer.Option("--attempt", min=0, help="An attempt. Default: the newest.")] = None,
    previous: Annotated[bool, typer.Option("--previous", help="The attempt before the newest.")] = False,
    output: OutputOption = OutputFormat.TABLE,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Print the logs of a job's pods as one, by time, with rank and node in front of each line."""
    from moejob_cli.cluster import logs
    from moejob_cli.cluster.jobs import ClusterChoice, run_verb
    from moejob_client.log_selection import LogSelection

    age = None if since is None else logs.parse_age(since)
    if since is not None and age is None:
        raise typer.BadParameter(f"{since!r} is no age; write 90s, 10m, 2h or 1d", param_hint="--since")
    if previous and (follow or attempt is not None):
        raise typer.BadParameter("has a meaning only without --follow and --attempt", param_hint="--previous")
    selection = LogSelection(rank, failed, node, age, attempt, previous)

    async def print_lines(client: "AsyncClient") -> CommandExit:
        is_json = output is not OutputFormat.TABLE
        return await logs.print_logs(client, name, selection, is_followed=follow, is_json=is_json)

    raise typer.Exit(run_verb(ClusterChoice(namespace, context), print_lines))


@verbs.command("steps", short_help="Print the step log of a job or a run.")
def print_steps(
    name: RunOrJobArgument,
    output: OutputOption = OutputFormat.TABLE,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Print the step log of a job from its volume, or of a run; -o json prints every number, one object a line."""
    from moejob_cli.cluster import files
    from moejob_cli.cluster.jobs import ClusterChoice, run_reading, run_verb
    from moejob_cli.notices import print_notice

    is_json = output is not OutputFormat.TABLE
    if Path(name).is_dir():
        raise typer.Exit(run_reading(files.print_steps(files.read_run_steps(Path(name)), is_json=is_json)))

    def print_log(client: "AsyncClient") -> "Awaitable[CommandExit]":
        return files.print_steps(client.steps(name, report=print_notice), is_json=is_json)

    raise typer.Exit(run_verb(ClusterChoice(namespace, context), print_log))


@verbs.command("samples", short_help="Print answers of a job or a run with their rewards.")
def print_samples(
    name: RunOrJobArgument,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Answers of this step. Default: the newest.")
    ] = None,
    evaluation: Annotated[bool, typer.Option("--eval", help="Answers of evaluations.")] = False,
    output: OutputOption = OutputFormat.TABLE,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Print prompts, answers and rewards of a step of a job or a run; -o json prints one object a line."""
    from moejob_cli.cluster import files
    from moejob_cli.cluster.jobs import ClusterChoice, run_reading, run_verb
    from moejob_cli.notices import print_notice

    is_json = output is not OutputFormat.TABLE
    if Path(name).is_dir():
        samples = files.read_run_samples(Path(name), step, is_evaluation=evaluation)
        raise typer.Exit(run_reading(files.print_samples(samples, is_json=is_json)))

    def print_answers(client: "AsyncClient") -> "Awaitable[CommandExit]":
        answers = client.samples(name, step, is_evaluation=evaluation, report=print_notice)
        return files.print_samples(answers, is_json=is_json)

    raise typer.Exit(run_verb(ClusterChoice(namespace, context), print_answers))


@verbs.command("cp", short_help="Copy files of a job to this machine.")
def copy_files(
    name: JobArgument,
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="A file or a folder of the run folder, as export.", show_default=False),
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="New folder for it.", show_default=False)],
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Copy a file or a folder from the volume of a job into a new folder, as `moejob cp JOB export model`."""
    from moejob_cli.cluster.files import copy_files
    from moejob_cli.cluster.jobs import ClusterChoice, run_verb

    choice = ClusterChoice(namespace, context)
    raise typer.Exit(run_verb(choice, lambda client: copy_files(client, name, path, target)))


@verbs.command("top", short_help="Show speed, memory and time left of a job.")
def show_job(
    name: JobArgument,
    every: Annotated[float, typer.Option("--every", min=0.5, help="Seconds between two looks.")] = 5.0,
    output: OutputOption = OutputFormat.TABLE,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Show step, speed, memory, GPU use and time left of a job on one screen until it ends; -o json prints once."""
    from moejob_cli.cluster.jobs import ClusterChoice, run_verb
    from moejob_cli.cluster.top import show_job

    is_json = output is not OutputFormat.TABLE
    choice = ClusterChoice(namespace, context)
    raise typer.Exit(run_verb(choice, lambda client: show_job(client, name, every, is_json=is_json)))


@verbs.command("open", short_help="Show jobs of the cluster in the browser.")
def open_jobs(
    names: Annotated[list[str], typer.Argument(metavar="JOB...", help="Jobs, @latest the newest.", show_default=False)],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = 8265,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Show curves, failures, answers and layout of jobs in the browser, from copies of their files; Ctrl-C ends it."""
    from moejob_cli.cluster.jobs import ClusterChoice, run_verb
    from moejob_cli.cluster.page import open_page

    raise typer.Exit(run_verb(ClusterChoice(namespace, context), lambda client: open_page(client, names, port)))


@verbs.command("compare", short_help="Say how runs differ.")
def compare_runs(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|JOB...", help="Run folders, folders of them, jobs of the cluster.", show_default=False
        ),
    ],
    output: OutputOption = OutputFormat.TABLE,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Say in which fields the jobs of runs differ, and how far apart their curves are; -o json has every number."""
    from moejob_cli.board.commands import open_runs, show_comparison
    from moejob_cli.cluster.jobs import ClusterChoice, run_verb
    from moejob_cli.job_names import is_job_name

    def show_runs(runs: "list[RunFiles]") -> None:
        if len(runs) < _LEAST_COMPARED:
            raise typer.BadParameter("name two runs or more", param_hint="RUN|JOB")
        show_comparison(runs, output)

    if not any(is_job_name(Path(name)) for name in names):
        show_runs(open_runs([Path(name) for name in names]))
        return
    from moejob_cli.cluster.page import compare_jobs

    choice = ClusterChoice(namespace, context)
    raise typer.Exit(run_verb(choice, lambda client: compare_jobs(client, names, show_runs)))


@verbs.command("stacks", short_help="Print the Python stacks of all ranks.")
def print_stacks(
    name: RunOrJobArgument,
    output: OutputOption = OutputFormat.TABLE,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Print the Python stacks of all ranks, which continue; ranks with the same stacks together, the fewest first."""
    from moejob_cli.cluster import stacks
    from moejob_cli.cluster.jobs import ClusterChoice, run_verb

    is_json = output is not OutputFormat.TABLE
    if Path(name).is_dir():
        raise typer.Exit(stacks.print_run_stacks(Path(name), is_json=is_json))
    choice = ClusterChoice(namespace, context)
    raise typer.Exit(run_verb(choice, lambda client: stacks.print_job_stacks(client, name, is_json=is_json)))


@verbs.command("doctor", short_help="Check what a cluster offers to jobs.")
def check_cluster(
    output: OutputOption = OutputFormat.TABLE, namespace: NamespaceOption = None, context: ContextOption = None
) -> None:
    """Check API server, CRD, rights, storage, GPUs, drivers, images and queues of a namespace; exit 1: a warning."""
    from moejob_cli.cluster import doctor
    from moejob_cli.cluster.jobs import ClusterChoice, run_verb

    async def print_findings(client: "AsyncClient") -> CommandExit:
        if output is OutputFormat.TABLE:
            return await doctor.print_findings(client)
        document, exit_code = await doctor.findings_document(client)
        print_document(document, output)
        return exit_code

    raise typer.Exit(run_verb(ClusterChoice(namespace, context), print_findings))


@verbs.command("submit", short_help="Create a job in the cluster.")
def submit_job(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A job's YAML, or - for standard input.", show_default=False)
    ],
    settings: SweepOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show the plan, then the run. Ctrl-C leaves the job alone.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Ask the cluster for its verdict, and create nothing.")
    ] = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Create a job in the cluster, or the jobs of a sweep, unless a plan is refused here already."""
    from moejob_cli.cluster import jobs
    from moejob_cli.inputs import plan_file, plan_swept_jobs
    from moejob_cli.report import plan_report
    from moejob_cli.sweeps import is_sweep, overlay_words

    is_swept = is_sweep(settings or ())
    if is_swept and follow:
        raise typer.BadParameter("follows one job; `moejob watch` follows all of a namespace", param_hint="--follow")
    answers = plan_swept_jobs(file, settings or ()) if is_swept else (plan_file(file, settings or ()),)
    for answer in answers:
        if follow or not answer.plan.is_accepted:
            print_report(plan_report(answer, all_ranks=False))
        # With its profile, which is in the cluster, a job may be another one.
        if not answer.plan.is_accepted and answer.job.spec.profile is None:
            raise typer.Exit(CommandExit.REFUSED)
    choice = jobs.ClusterChoice(namespace or answers[0].job.metadata.namespace, context)

    async def submit_answers(client: "AsyncClient") -> CommandExit:
        described_jobs = [answer.job for answer in answers]
        return await jobs.submit_jobs(client, described_jobs, dry_run=dry_run, follow=follow)

    try:
        exit_code = jobs.run_verb(choice, submit_answers)
    except KeyboardInterrupt:
        at = f" -n {choice.namespace}" if choice.namespace else ""
        at += f" --context {context}" if context else ""
        typer.echo(jobs.follow_words(f"moejob watch {answers[0].job.metadata.name}{at}"), err=True)
        raise
    if is_swept and not dry_run and exit_code is CommandExit.ACCEPTED:
        typer.echo(overlay_words("moejob open", [answer.job.metadata.name for answer in answers]), err=True)
    raise typer.Exit(exit_code)


@verbs.command("suspend", short_help="Stop a job after a checkpoint.")
def suspend_job(name: JobArgument, namespace: NamespaceOption = None, context: ContextOption = None) -> None:
    """Stop the pods of a job after a checkpoint, and keep its volume."""
    _steer_job(name, namespace, context, "suspended")


@verbs.command("resume", short_help="Let a suspended job go on.")
def resume_job(name: JobArgument, namespace: NamespaceOption = None, context: ContextOption = None) -> None:
    """Let a suspended job go on from its newest checkpoint."""
    _steer_job(name, namespace, context, "resumed")


@verbs.command("cancel", short_help="Delete a job.")
def cancel_job(name: JobArgument, namespace: NamespaceOption = None, context: ContextOption = None) -> None:
    """Delete a job with its pods; storage.reclaim decides about its volume."""
    _steer_job(name, namespace, context, "deleted")


def _steer_job(name: str, namespace: str | None, context: str | None, result: str) -> NoReturn:
    """Change a job, and say by a participle what became of it."""
    from moejob_cli.cluster.jobs import ClusterChoice, run_verb

    async def apply_change(client: "AsyncClient") -> CommandExit:
        actions = {"suspended": client.suspend, "resumed": client.resume, "deleted": client.cancel}
        typer.echo(f"{client.namespace}/{await actions[result](name)}: {result}")
        return CommandExit.ACCEPTED

    raise typer.Exit(run_verb(ClusterChoice(namespace, context), apply_change))

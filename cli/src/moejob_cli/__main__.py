"""Entry point of `moejob`: runs a command and turns every error into one message and an exit code."""

from __future__ import annotations

import gc
import os
import sys

from moejob_cli.exits import CommandExit

# The variable, set to any value, lets an internal error of moejob show its traceback.
DEBUG = "MOEJOB_DEBUG"
# Garbage is collected after this many new objects: a plan makes fewer, `moejob run` may make more.
_COLLECTED_AFTER = 200_000


def main() -> None:
    """Run the command line; never lets a traceback through unless MOEJOB_DEBUG is set."""
    # Imported objects live until the end. Python would search them for garbage again and again during the imports, and
    # once more at the end: a sixth of the time of a plan.
    gc.set_threshold(_COLLECTED_AFTER)
    try:
        _run()
    finally:
        gc.freeze()


def _run() -> None:
    # pydantic looks for plugins in the metadata of every installed package: 20 ms of each command that reads a job.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    import typer

    from moejob_api.problems import InvalidSpec
    from moejob_cli.app import app, print_hint

    try:
        app()
    except InvalidSpec as error:
        for problem in error.problems:
            typer.echo(f"error: {problem}", err=True)
        print_hint(error.problems)
        sys.exit(CommandExit.UNREADABLE)
    except BrokenPipeError:
        # The reader of a pipe (head, less) went away. Point stdout elsewhere, or Python complains while it closes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(CommandExit.ACCEPTED)
    except KeyboardInterrupt:
        sys.exit(CommandExit.INTERRUPTED)
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        typer.echo(
            f"error: moejob failed by a fault of its own ({type(error).__name__}: {error}); "
            f"run it again with {DEBUG}=1 and report what it prints",
            err=True,
        )
        sys.exit(CommandExit.INTERNAL)


if __name__ == "__main__":
    main()

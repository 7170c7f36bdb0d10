"""The commands on exported models: ask one, and give one to others.

Annotations are not imported from __future__: they would be text, which typer evaluates four times for every command.
"""

from pathlib import Path
from typing import Annotated

import typer

from moejob_cli.option_types import ChatEngine

model_commands = typer.Typer()


RunOrModelArgument = Annotated[
    Path, typer.Argument(metavar="RUN|EXPORT", help="A run folder, or an exported model.", show_default=False)
]


@model_commands.command("chat", short_help="Ask the model of a run.")
def chat_with_model(
    place: RunOrModelArgument,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="Answer this and end. Default: a conversation, or standard input."),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="Text of a system message.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens of an answer.")] = 512,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token each time.")
    ] = 0.0,
    engine: Annotated[
        ChatEngine | None, typer.Option("--engine", help="Default: vLLM where it and a GPU are here.")
    ] = None,
) -> None:
    """Ask the model of a run, finished or not, or of an export; answers appear as they are generated."""
    from moejob_api.contract.pods import ExitCode
    from moejob_cli.chat import ChatOptions, answer_once, find_model, hold_conversation, read_question, start_chat
    from moejob_cli.running.machine import CannotRun

    options = ChatOptions(system, max_tokens, temperature)
    try:
        question = read_question(prompt)
        if question == "":
            raise typer.BadParameter("standard input is empty; write a question", param_hint="PROMPT")
        with find_model(place) as folder, start_chat(folder, engine, options) as chat:
            if question is None:
                hold_conversation(chat)
            else:
                answer_once(chat, question)
    except CannotRun as refused:
        typer.echo(f"error: {refused}", err=True)
        raise typer.Exit(ExitCode.BAD_CONFIGURATION) from None


@model_commands.command("push", short_help="Upload an exported model to a hub.")
def push_model(
    place: RunOrModelArgument,
    repository: Annotated[
        str, typer.Option("--to", metavar="OWNER/NAME", help="The model's name on the hub; made where it is new.")
    ],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option("--revision", help="A branch. Default: main.")] = None,
    message: Annotated[str, typer.Option("--message", "-m", help="Message of the commit.")] = "Upload the model",
) -> None:
    """Upload an exported model, or that of a run, to a hub as one commit; HF_TOKEN and HF_ENDPOINT count."""
    from moejob_api.contract.pods import escaped_lines
    from moejob_cli.interchange import push_model

    arguments = ["--message", message, *(["--private"] if private else [])]
    arguments += ["--revision", revision] if revision is not None else []
    pushed = push_model(place, repository, arguments)
    text = escaped_lines(pushed.message)
    typer.echo(f"error: {text}" if pushed.exit_code else text, err=bool(pushed.exit_code))
    raise typer.Exit(pushed.exit_code)

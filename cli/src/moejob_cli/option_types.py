"""Options and arguments that several commands have.

Annotations are not imported from __future__: they would be text, which typer evaluates four times for every command.
"""

from enum import StrEnum
from typing import Annotated

import typer


class OutputFormat(StrEnum):
    """The format of an answer."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class ChatEngine(StrEnum):
    """The library that runs a model which is asked."""

    VLLM = "vllm"
    TRANSFORMERS = "transformers"


OutputOption = Annotated[OutputFormat, typer.Option("--output", "-o", help="How to print the answer.")]
_SETTING_HELP = (
    "Set a field of the job for this command, as training.maxSteps=20 or data.train[0].source=chats.jsonl; "
    "typed as in YAML, an empty value removes the field. May be given several times."
)
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help=_SETTING_HELP)]
SweepOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE[,VALUE...]",
        help=f"{_SETTING_HELP} Values with commas between them make a sweep: a job of each combination, whose name "
        "says the values.",
    ),
]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace of the cluster. Default: that of the context.")
]
ContextOption = Annotated[
    str | None, typer.Option("--context", help="Context of the kubeconfig. Default: the current one.")
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job, @latest the newest.", show_default=False)]
RunOrJobArgument = Annotated[
    str, typer.Argument(metavar="JOB|RUN", help="A job, @latest the newest; or a run folder.", show_default=False)
]

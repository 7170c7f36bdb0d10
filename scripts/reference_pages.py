"""Pages of the reference, made of the code: a new name in the code is on its page without further work.

No module of the site is imported, so tests read the pages without the site's packages.
"""

from __future__ import annotations

import inspect
import json
import re
import runpy
from collections.abc import Iterator
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import generate_latest
from typer.main import get_command

from moejob_api.contract import pods
from moejob_api.documents.peer_names import peer_names
from moejob_api.job.fields import FieldKind, JobField, job_fields
from moejob_api.job.status import ConditionType, Phase
from moejob_cli.app import app
from moejob_operator.actions import EventReason
from moejob_operator.planning.decision import Reason
from moejob_operator.runtime.metrics import Metrics
from moejob_operator.runtime.settings import Settings

ROOT = Path(__file__).parents[1]
# A pod that reports everything, so that every metric of it shows.
_FULL_PROGRESS = pods.PodProgress(
    attempt=0,
    index=0,
    ready=True,
    ranks=(pods.ReportedHeartbeat(rank=0, pid=1, step=0, age_seconds=0),),
    run=pods.RunProgress.model_validate(
        {
            **dict.fromkeys(pods.RunProgress.model_fields, 1),
            "measures": {"tokensPerSecond": 1.0, "seconds": 1.0},
            "hub_commits": (),
        }
    ),
)
_HELP = re.compile(r"^# HELP (\S+) (.*)$", re.MULTILINE)
_TYPE = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)
_TYPES = {FieldKind.TEXT: "string", FieldKind.WHOLE: "integer", FieldKind.NUMBER: "number", FieldKind.SWITCH: "boolean"}
# A comment describes the member of an enumeration, or the variable, below it.
_MEMBER = re.compile(r"^((?: +# .*\n)*) +(\w+) = ", re.MULTILINE)
_VARIABLE = re.compile(r'^((?:# .*\n)*)\w+ = "(MOEJOB_\w+)"$', re.MULTILINE)


def all_pages() -> Iterator[tuple[str, str]]:
    """Yield each page by its path in the site."""
    yield "reference/fields.md", _fields_page()
    yield "reference/commands.md", _commands_page()
    yield "reference/contract.md", _contract_page()
    yield "reference/operator.md", _settings_page()
    yield "reference/metrics.md", _metrics_page()
    yield "reference/conditions.md", _conditions_page()
    yield "reference/chart.md", _chart_page()


def _fields_page() -> str:
    lines = ["# Fields of a MoETrainingJob", ""]
    lines += [
        "`moejob explain FIELD` and `kubectl explain moetrainingjob.spec` print the same. Each field has an anchor"
    ]
    lines += ["of its path: `#spec.training.maxSteps`. Names that other trainers have for a field stand behind it."]
    section = None
    for path, field in job_fields().walk_fields():
        if path.startswith(("spec", "status")) and field.description:
            if _section_of(path) != section:
                section = _section_of(path)
                lines += ["", f"## {section}", "", "| field | type | default | meaning |", "|---|---|---|---|"]
            lines.append(_field_row(path, field))
    return "\n".join(lines) + "\n"


def _section_of(path: str) -> str:
    """Return the part of spec that a field belongs to, or status."""
    root, _, rest = path.partition(".")
    return f"spec.{rest.partition('.')[0].removesuffix('[]')}" if root == "spec" and rest else root


def _field_row(path: str, field: JobField) -> str:
    has_default = field.kind is not FieldKind.OBJECT and field.default not in (None, "")
    default = f"`{field.default}`" if has_default else ""
    others = ", ".join(f"`{name}`" for name in peer_names().get(path, ()))
    meaning = _table_cell(field.description) + (f" Elsewhere: {others}." if others else "")
    return f'| `{path}` | {_type_text(field)} | {default} | <a id="{path}"></a>{meaning} |'


def _type_text(field: JobField) -> str:
    named = " \\| ".join(field.choices) or _TYPES.get(field.kind, field.kind.value)
    bounds = ", ".join(
        f"{word} {value:g}"
        for word, value in (("from", field.minimum), ("to", field.maximum))
        if value is not None and not field.choices
    )
    return f"{named} ({bounds})" if bounds else named


def _commands_page() -> str:
    lines = ["# Commands", ""]
    # It is a group of commands, although typer's type does not know this.
    group: Any = get_command(app)
    for name, command in group.commands.items():
        lines += [f"## moejob {name}", "", command.help or "", "", "| option | meaning |", "|---|---|"]
        for parameter in command.params:
            names = ", ".join(parameter.opts)
            lines.append(f"| `{names}` | {_table_cell(getattr(parameter, 'help', '') or '')} |")
        lines.append("")
    return "\n".join(lines)


def _contract_page() -> str:
    parts: tuple[tuple[str, type[StrEnum | IntEnum]], ...] = (
        ("Environment variables of a pod", pods.Environment),
        ("Ports", pods.PodPort),
        ("Paths over HTTP", pods.HttpPath),
        ("Exit codes", pods.ExitCode),
        ("Labels", pods.Label),
        ("Files of a run folder", pods.RunFile),
    )
    lines = ["# Contract of operator, `moejob run` and trainer", ""]
    for title, members in parts:
        meanings = {name: _comment_text(text) for text, name in _MEMBER.findall(inspect.getsource(members))}
        lines += [f"## {title}", "", "| name | value | meaning |", "|---|---|---|"]
        lines += [f"| {member.name} | `{member.value}` | {meanings[member.name]} |" for member in members]
        lines.append("")
    return "\n".join([*lines, *_variable_lines()])


def _variable_lines() -> Iterator[str]:
    """Yield the lines about variables that one package alone reads: from a shell, or from a launcher to its ranks."""
    yield from ("## Other environment variables", "", "| name | read by | meaning |", "|---|---|---|")
    for path in sorted(ROOT.glob("*/src/*/**/*.py")):
        module = ".".join(path.with_suffix("").parts[path.parts.index("src") + 1 :])
        for text, name in _VARIABLE.findall(path.read_text(encoding="utf-8")):
            yield f"| `{name}` | `{module}` | {_comment_text(text)} |"
    yield ""


def _comment_text(text: str) -> str:
    return _table_cell(" ".join(line.strip().removeprefix("# ") for line in text.splitlines()))


def _settings_page() -> str:
    lines = ["# Settings of the operator", "", "A flag wins over its variable, a variable over the default.", ""]
    lines += ["| flag | variable | default | meaning |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        flag, variable = name.replace("_", "-"), f"{Settings.model_config['env_prefix']}{name.upper()}"
        # A default that depends on this machine would be wrong for the reader.
        default = "" if field.default_factory or field.default is None else f"`{field.default}`"
        lines.append(f"| `--{flag}` | `{variable}` | {default} | {_table_cell(field.description or '')} |")
    return "\n".join(lines) + "\n"


def _metrics_page() -> str:
    operator = generate_latest(Metrics().registry).decode()
    # Read as a file: the package around it needs torch.
    format_metrics = runpy.run_path(str(ROOT / "trainer/src/moejob_trainer/launcher/metrics.py"))["format_metrics"]
    lines = ["# Metrics", "", "All are in Prometheus' text format; those that any Python process has are left out.", ""]
    for title, text in (
        ("Operator: `/metrics` beside `/healthz`", operator),
        (f"Trainer pods: `/metrics` on port {pods.PodPort.PROGRESS.value}", format_metrics(_FULL_PROGRESS)),
    ):
        lines += [f"## {title}", "", "| name | type | meaning |", "|---|---|---|"]
        types = dict(_TYPE.findall(text))
        lines += [
            f"| `{name}` | {types[name]} | {_table_cell(meaning)} |"
            for name, meaning in _HELP.findall(text)
            if name.startswith("moejob_")
        ]
        lines.append("")
    return "\n".join(lines)


def _conditions_page() -> str:
    lines = ["# Phases, conditions and events", ""]
    parts: tuple[tuple[str, type[StrEnum]], ...] = (
        ("Phases: `status.phase`", Phase),
        ("Conditions: `status.conditions[].type`", ConditionType),
        ("Reasons of conditions: `status.conditions[].reason`", Reason),
        ("Reasons of events", EventReason),
    )
    for title, members in parts:
        lines += [f"## {title}", "", inspect.getdoc(members) or "", ""]
        lines += [f"- `{member.value}`" for member in members]
        lines.append("")
    return "\n".join(lines)


def _chart_page() -> str:
    chart = ROOT / "charts" / "moejob"
    schema = json.loads((chart / "values.schema.json").read_text())
    values = yaml.safe_load((chart / "values.yaml").read_text())
    lines = ["# Values of the chart", "", "| value | default | meaning |", "|---|---|---|"]
    lines += [
        f"| `{path}` | `{json.dumps(default)}` | {_table_cell(meaning)} |"
        for path, default, meaning in _value_leaves(schema, values, "")
    ]
    return "\n".join(lines) + "\n"


def _value_leaves(schema: dict[str, Any], values: Any, path: str) -> Iterator[tuple[str, Any, str]]:
    """Yield path, default and description of each value below a part of the schema."""
    for name, inner in schema.get("properties", {}).items():
        default = values.get(name) if isinstance(values, dict) else None
        if inner.get("properties"):
            yield from _value_leaves(inner, default, f"{path}{name}.")
        else:
            yield f"{path}{name}", default, inner.get("description", "")


def _table_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

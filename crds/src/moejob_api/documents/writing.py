"""Jobs and other plain values as YAML that kubectl and PyYAML read alike."""

from __future__ import annotations

import yaml
from pydantic import JsonValue

from moejob_api.documents.scalars import NotFiniteError, resolve_scalar
from moejob_api.job import MoETrainingJob

_WIDTH = 120


def dump_job(job: MoETrainingJob) -> str:
    """The YAML a person would write for a job: its own fields in the models' order, without what is default anyway."""
    # What Kubernetes and the operator set, no one writes into a file.
    body = job.model_dump(
        mode="json",
        by_alias=True,
        exclude_defaults=True,
        exclude={"status": True, "metadata": {"uid": True, "generation": True}},
    )
    return yaml_text(body)


def yaml_text(value: JsonValue) -> str:
    """A value as block-style YAML, keys in their order, without aliases; the same value always gives the same text."""
    text: str = yaml.dump(value, Dumper=_YamlDumper, sort_keys=False, allow_unicode=True, width=_WIDTH)
    return text


class _YamlDumper(yaml.SafeDumper):
    def ignore_aliases(self, _data: object) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=_text_style(text))

    def represent_number(self, number: float) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:float", _short_number(number))


_YamlDumper.add_representer(str, _YamlDumper.represent_text)
_YamlDumper.add_representer(float, _YamlDumper.represent_number)


def _short_number(number: float) -> str:
    mantissa, _, exponent = repr(number).partition("e")
    if not exponent:
        return mantissa
    # To PyYAML, which others may read this with, 1e-5 is text: a number has a point in front and a sign behind the e.
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent):+d}"


def _text_style(text: str) -> str | None:
    """Quotes where kubectl would read something else than text, a block where lines are kept as they are."""
    if not all(character.isprintable() or character == "\n" for character in text):
        return '"'
    if "\n" in text:
        return "|" if _can_be_block(text) else '"'
    try:
        return None if resolve_scalar(text) == text else "'"
    except NotFiniteError:
        return "'"


def _can_be_block(text: str) -> bool:
    """Return whether a block keeps the text as it is, without an indentation mark or a line that the eye loses."""
    lines = text.split("\n")
    return not text[0].isspace() and all(line == line.rstrip() for line in lines)

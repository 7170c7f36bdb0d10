"""Options without validators until the command line has a value for them.

Typer builds a pydantic validator for every option of a command, with or without a value. For shell completion, which
needs no value, that would take twice as long as all other work; and importing pydantic takes a verb of a cluster, whose
values are names and defaults, a third of its start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import EnumType
from typing import Any

from typer._click import Command, Context, Parameter
from typer._coercion import RuntimeParam, build_runtime_param
from typer.core import TyperArgument, TyperGroup, TyperOption


@dataclass(frozen=True)
class UnbuiltParam(RuntimeParam):
    """A stand-in for the validator of an option, which is built once there is a value; None needs no validator."""

    def _coerce_value(self, value: Any, param: Any, ctx: Context) -> Any:
        # Completing a word runs no command that would read it.
        if ctx.resilient_parsing or is_valid_already(value, self.annotation):
            return value
        converted = _convert_text(value, self.annotation)
        return build_runtime_param(param.type_descriptor).coerce(value, param, ctx) if converted is None else converted


def is_valid_already(value: Any, annotation: Any) -> bool:
    """Return whether a value is what the option takes: a default, for the command line gives texts, or a text."""
    if annotation is str or not isinstance(value, str):
        return isinstance(annotation, type) and isinstance(value, annotation)
    return isinstance(annotation, EnumType) and isinstance(value, annotation)


def _convert_text(value: Any, annotation: Any) -> Any:
    """Return texts as a list, and a name as its enumeration's; None for all else, which needs a validator."""
    if annotation == list[str]:
        return [*value]
    if not (isinstance(annotation, EnumType) and isinstance(value, str)):
        return None
    # Of a type that is not known before, mypy takes the members for none at all.
    names: set[Any] = set(annotation)
    return annotation(value) if value in names else None


class LazyCommands(TyperGroup):
    """The commands of a program, whose options get their validators when they have values."""

    def get_params(self, ctx: Context) -> list[Parameter]:
        """Return the program's own options."""
        return _delay_validators(super().get_params(ctx))

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        """Return a command by its name."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _delay_validators(command.get_params(ctx))
        return command


def _delay_validators(parameters: Iterable[Parameter]) -> list[Parameter]:
    delayed = [*parameters]
    for parameter in delayed:
        if isinstance(parameter, TyperOption | TyperArgument) and parameter._runtime_param is None:  # noqa: SLF001
            descriptor = parameter.type_descriptor
            parameter._runtime_param = UnbuiltParam(descriptor.parameter_info, descriptor.annotation)  # noqa: SLF001 typer has no other way
    return delayed

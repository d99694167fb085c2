"""The options of the commands, from the table `options.toml`."""

import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from dp_core.config.privacy import LEAST_DELTA, LEAST_NOISE, MOST_CLAIM
from dp_core.privacy.execution_plan import MOST_NOISE

Command = TypeVar("Command", bound=Callable[..., Any])
_TABLE = tomllib.loads(Path(__file__).with_name("options.toml").read_text(encoding="utf-8"))


class Number(click.FloatRange):
    """A number in a range; `click.FloatRange` alone admits NaN."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number, or refuse it with the option's name."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail("nan is not a number", param, ctx)
        return number


_TYPES: dict[str, Any] = {
    "epsilon": Number(1e-6, MOST_CLAIM),
    "budget": Number(1e-6, 1e9),  # above `MOST_CLAIM`: of a study
    "delta": Number(LEAST_DELTA, 1 - 1e-9),
    "noise": Number(LEAST_NOISE, MOST_NOISE),
    "rate": Number(1e-9, 1.0),  # from 1 / (largest number of units)
    "count": click.IntRange(1, 10**12),
    "number": float,
    "whole number": int,
    "path": click.Path(path_type=Path),
    "file": click.Path(dir_okay=False, path_type=Path),
    "present file": click.Path(exists=True, dir_okay=False, path_type=Path),
}


def options(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds several options to a command, in this order."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def options_of(name: str) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of a table to a command, in the table's order."""
    return options(*(_option(flag, **entry) for flag, entry in _TABLE[name].items()))


def _option(flag: str, **entry: Any) -> Callable[[Command], Command]:
    names = [flag, *([entry.pop("name")] if "name" in entry else [])]
    if choice := entry.pop("choice", ()):
        entry["type"] = click.Choice(choice)
    elif bounds := entry.pop("range", ()):
        entry["type"] = (click.IntRange if isinstance(bounds[0], int) else Number)(*bounds)
    elif isinstance(of := entry.pop("type", None), str):
        entry["type"] = _TYPES[of]
    elif of:
        entry["type"] = tuple(_TYPES[part] for part in of)
    return click.option(*names, **entry)

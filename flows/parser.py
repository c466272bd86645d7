"""The argument parser of `novelty`: groups in the help, and for a wrong word the one meant.

A mistake is one sentence on stderr and exit code 2, as everywhere in the program.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from schemas.similar import did_you_mean

OTHERS = "more"
MOST_TIME = 1e7
"""Of hours a thousand years; beyond it there is no date."""


def time_in(unit: str) -> Callable[[str], float]:
    """The type of an option of so many hours or days."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if abs(number := float(text)) < (MOST_TIME if unit == "hours" else MOST_TIME / 24):
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is no number of {unit}")

    return read


def whole_number(least: int = 0, most: int | None = None) -> Callable[[str], int]:
    """The type of an option of a whole number within these bounds."""
    bounds = f"from {least} on" if most is None else f"from {least} to {most}"

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            if least <= (number := int(text)) and (most is None or number <= most):
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number {bounds}")

    return read


def path_text(text: str) -> str:
    """The type of an option of a path; an empty one would be the folder where one is."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; name a file or folder")
    return text


class Parser(argparse.ArgumentParser):
    """`groups` of a parser with commands: title to the names in it; the rest is under `more`."""

    def __init__(
        self, *args: Any, groups: Mapping[str, Sequence[str]] | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.groups = groups or {}
        self.taken: set[str] = set()

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog.split()[0]}: {message}; see `{self.prog} --help`", file=sys.stderr)
        sys.exit(2)

    def parse_known_args(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        self.taken.clear()
        parsed, left = super().parse_known_args(args, namespace)
        if left:
            options = [option for action in self._actions for option in action.option_strings]
            word = left[0].partition("=")[0]
            known = options if word.startswith("-") else []
            self.error(f"{word} is not known here{did_you_mean(word, known)}")
        return parsed, left

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Called once for each time that an option stands there; argparse would take the last."""
        if action.option_strings and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "expected one argument")  # argparse drops it
        if action.option_strings and isinstance(action, SINGLE):
            if action.dest in self.taken:
                name = " or ".join(action.option_strings)
                raise argparse.ArgumentError(None, f"{name} is given twice; it takes one value")
            self.taken.add(action.dest)
        return super()._get_values(action, arg_strings)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(name) for name in action.choices]
        what = action.metavar or action.dest or "value"
        hint = "" if isinstance(action, Commands) else f"; there are: {', '.join(names)}"
        raise argparse.ArgumentError(
            None, f"unknown {what} {value!r}{did_you_mean(str(value), names) or hint}"
        )

    def commands(self) -> "dict[str, Parser]":
        """The parsers of the commands below this one, by name."""
        actions = [action for action in self._actions if isinstance(action, Commands)]
        return dict(actions[0].choices) if actions else {}

    def format_help(self) -> str:
        below = next((action for action in self._actions if isinstance(action, Commands)), None)
        if below is None:
            return super().format_help()
        about = {choice.dest: choice.help or "" for choice in below._choices_actions}
        grouped_names = {name for names in self.groups.values() for name in names}
        groups = {**self.groups, OTHERS: [name for name in about if name not in grouped_names]}
        width = max(map(len, about)) + 2
        lines = [f"usage: {self.prog} COMMAND …", "", self.description or ""]
        for title, names in groups.items():
            if names := [name for name in names if name in about]:
                heading = title if len(groups) > 1 and self.groups else "commands"
                lines += ["", f"{heading}:", *(f"  {n:<{width}}{about[n]}" for n in names)]
        footer = f"`{self.prog} COMMAND --help` has every option; `--quiet` leaves out progress."
        return "\n".join([*lines, "", footer, ""])


SINGLE = (argparse._StoreAction, argparse.BooleanOptionalAction)
"""The actions of options with one value: `--x VALUE`, and `--x` or `--no-x`."""
Commands = argparse._SubParsersAction
"""The action that argparse makes of a parser's commands; it has no public name."""

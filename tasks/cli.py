"""The command line `confide …`. A command is imported only when it is called."""

from __future__ import annotations

import os
import pkgutil
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from inspect import cleandoc
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from dp_core.errors import OUT_OF_MEMORY, BadInput, ConfideError, fault_line, in_one_line
from tasks.protocol import CHECKOUT, INSTALLED, SETUP

_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # bytes that Python could not decode
_OUT_OF_MEMORY = f"confide: {OUT_OF_MEMORY}\n".encode()

# Verbs by task. No module is imported for the list of commands.
_TABLE = Path(__file__).with_name("commands") / "commands.toml"
TASKS: dict[str, dict[str, list[str]]] = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
COMMANDS = {verb: entry for verbs in TASKS.values() for verb, entry in verbs.items()}


class LazyGroup(click.Group):
    """A group that imports a command's module only to run it or to show its own help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which a newcomer meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = pkgutil.resolve_name(f"tasks.commands.{COMMANDS[cmd_name][0]}")
        _move_examples([command, *getattr(command, "commands", {}).values()])
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands and options that begin with these letters, without imports."""
        verbs = [
            CompletionItem(verb, help=words)
            for verb, (_, words) in COMMANDS.items()
            if verb.startswith(incomplete)
        ]
        return verbs + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of each task from the table above, without imports."""
        for task, verbs in TASKS.items():
            with formatter.section(task):
                formatter.write_dl(
                    [(verb, words) for verb, (_, words) in verbs.items()], col_max=14
                )


def _version() -> str:
    """Return the version in the project file, from which an installed package has its metadata."""
    if INSTALLED:
        return metadata.version("confide")
    return str(tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"])


def _move_examples(commands: Iterable[click.Command]) -> None:
    """Show the examples of a command's docstring after its options, line by line."""
    for command in commands:
        command.help, heading, lines = cleandoc(command.help or "").partition("Example:\n")
        if heading:
            command.epilog = f"\b\n{heading}{lines}"


@click.group(
    cls=LazyGroup,
    commands={verb: click.Command(verb) for verb in COMMANDS},  # names, for suggestions
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`confide COMMAND --help` explains a command, with an example.",
)
@click.version_option(_version(), message="%(prog)s %(version)s")
def cli() -> None:
    """Train language models on confidential text under differential privacy, with proof."""


def main() -> int:
    """Run the command line; write an error as one line, and return the exit code."""
    try:
        if _NOT_UTF8.search("".join(sys.argv)):  # no settings, ledger or page can hold it
            raise BadInput("a word is not UTF-8", where="command line", fix="Choose another name.")
        code = cli.main(prog_name="confide", standalone_mode=False)
    except click.Abort:
        click.echo("confide: stopped", err=True)
        return 130
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()  # prints the help; this is no error
        return error.exit_code
    except click.ClickException as error:
        click.echo(f"confide: {in_one_line(error.format_message())}", err=True)
        return error.exit_code
    except ConfideError as error:
        _traceback()
        click.echo(f"confide: {error}", err=True)
        return error.exit_code
    except (KeyboardInterrupt, SystemExit):
        raise
    except ModuleNotFoundError as error:
        _traceback()
        click.echo(f"confide: the package {error.name} is missing. Run: {SETUP}", err=True)
        return 1
    except BaseException as error:  # noqa: BLE001 - as `tasks.execution.contract.main`
        _end_with_line(error)
        return 1
    return code if isinstance(code, int) else 0  # click hands the code of `exit` back


def _end_with_line(error: BaseException) -> None:
    """Write an unexpected error to standard error in one line, even if memory is exhausted."""
    try:
        _traceback()
        click.echo(f"confide: {fault_line(error)}", err=True)
    except MemoryError:
        os.write(2, _OUT_OF_MEMORY)


def _traceback() -> None:
    if os.environ.get("CONFIDE_DEBUG"):
        import traceback

        traceback.print_exc()


if __name__ == "__main__":
    sys.exit(main())

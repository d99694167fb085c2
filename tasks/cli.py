"""The command line `confide …`. A command is imported only when it is called."""

from __future__ import annotations

import os
import pkgutil
import sys
import tomllib
from collections.abc import Iterable
from inspect import cleandoc
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from dp_core.errors import OUT_OF_MEMORY, ConfideError, fault_line

_OUT_OF_MEMORY = f"confide: {OUT_OF_MEMORY}\n".encode()
_PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
_VERSION = tomllib.loads(_PROJECT.read_text())["project"]["version"]

# Verbs by task, in the order in which a newcomer meets them: the module and function below
# `tasks.commands`, and one line of help. No module is imported for the list of commands.
TASKS = {
    "Begin": {
        "init": ("init_command:command", "Look at a file of notes, and write its settings."),
        "demo": ("local_stack:demo", "Run the demo job through Airflow, and show its report."),
        "doctor": ("doctor_command:command", "Check this machine, and suggest fixes."),
    },
    "Plan a budget": {
        "advise": ("advise_command:command", "Recommend a plan for a privacy budget."),
        "ledger": ("ledger_command:command", "Register and show the budgets of data sets."),
        "epsilon": ("epsilon_command:command", "Compute ε of a DP-SGD training."),
        "calibrate": ("epsilon_command:calibrate", "Compute the noise for a privacy target."),
    },
    "Train": {
        "run": ("run_command:command", "Run a whole job or sweep here, without Airflow."),
    },
    "Results": {
        "report": ("report_command:command", "Show the latest report's table and its page."),
        "compare": ("compare_command:command", "Compare settings, ε and scores of runs."),
        "errors": ("errors_command:command", "List a model's errors, for the operator."),
        "export": ("export_command:command", "Copy a released model into a new folder."),
    },
    "Audit and evidence": {
        "evidence": ("audit_command:evidence", "Write the evidence of a model's privacy."),
        "audit": ("audit_command:audit", "Audit any model's claim."),
        "audit-engine": ("audit_command:audit_engine", "Audit this installation."),
        "paper-table": ("paper_table_command:command", "Recompute the papers' figures."),
    },
    "Serve": {
        "up": ("local_stack:up", "Serve the Airflow and MLflow pages on this machine."),
        "down": ("local_stack:down", "Stop the services that `up` started."),
        "announce": ("local_stack:announce", "Announce a new version of a corpus to Airflow."),
    },
    "Maintain": {
        "backup": ("local_stack:backup", "Copy the ledger, the seeds and MLflow's database."),
    },
}
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
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(_VERSION, message="%(prog)s %(version)s")
def cli(debug: bool) -> None:
    """Train language models on confidential text under differential privacy, with proof."""
    if debug:
        os.environ["CONFIDE_DEBUG"] = "1"


def main() -> int:
    """Run the command line; write an error as one line, and return the exit code."""
    try:
        code = cli.main(prog_name="confide", standalone_mode=False)
    except click.Abort:
        click.echo("confide: stopped", err=True)
        return 130
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()  # prints the help; this is no error
        return error.exit_code
    except click.ClickException as error:
        click.echo(f"confide: {error.format_message()}", err=True)
        return error.exit_code
    except ConfideError as error:
        _traceback()
        click.echo(f"confide: {error}", err=True)
        return error.exit_code
    except (KeyboardInterrupt, SystemExit):
        raise
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

"""The command line `confide …`. A command is imported only when it is called."""

from __future__ import annotations

import os
import pkgutil
import sys

import click

from dp_core.errors import OUT_OF_MEMORY, ConfideError, fault_line

_OUT_OF_MEMORY = f"confide: {OUT_OF_MEMORY}\n".encode()

# Verb: the module and function below `tasks.commands`, and one line of help. No module is imported
# for the list of commands.
COMMANDS = {
    "demo": ("local_stack:demo", "Run the demo job through Airflow, and show its report."),
    "up": ("local_stack:up", "Serve the Airflow and MLflow pages on this machine."),
    "down": ("local_stack:down", "Stop what `up` started."),
    "announce": ("local_stack:announce", "Announce a version of a private corpus to Airflow."),
    "backup": ("local_stack:backup", "Copy the ledger, the seeds and MLflow's database."),
    "run": ("run_command:command", "Run a whole job or sweep here, without Airflow."),
    "advise": ("advise_command:command", "Recommend a plan for a privacy budget and a corpus."),
    "epsilon": ("epsilon_command:command", "Compute ε of a DP-SGD training, by PLD and by RDP."),
    "calibrate": ("epsilon_command:calibrate", "Compute the noise for a privacy target."),
    "audit-engine": ("audit_command:audit_engine", "Audit this installation on made-up data."),
    "paper-table": ("paper_table_command:command", "Recompute the papers' figures."),
    "ledger": ("ledger_command:command", "Show and register the budgets of data sets."),
    "report": ("report_command:command", "Show the latest report's table and its page."),
    "compare": ("compare_command:command", "Compare settings, ε, scores and exposure of runs."),
    "errors": ("errors_command:command", "List a model's errors with words, for the operator."),
    "export": ("export_command:command", "Copy a released model into a folder for others."),
    "evidence": ("audit_command:evidence", "Write the evidence of a released model's privacy."),
    "audit": ("audit_command:audit", "Audit a model's claim: from here or from elsewhere."),
    "doctor": ("doctor_command:command", "Check this machine and deployment, and suggest fixes."),
}


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
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table above, without imports."""
        with formatter.section("Commands"):
            formatter.write_dl([(verb, words) for verb, (_, words) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
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

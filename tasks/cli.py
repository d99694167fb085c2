"""`confide …`, for people. Commands are imported when they are called: `--help` costs nothing."""

from __future__ import annotations

import os
import pkgutil
import sys

import click

from dp_core.errors import OUT_OF_MEMORY, ConfideError, fault_line

_OUT_OF_MEMORY = f"confide: {OUT_OF_MEMORY}\n".encode()

LOCAL = {  # functions of tasks/commands/local_stack.py, with one line of help
    "demo": "Run the embedded job (or another) through Airflow, and show what came out.",
    "up": "Serve the Airflow and MLflow pages on this machine.",
    "down": "Stop what `up` started.",
}
COMMANDS = {  # modules of tasks/commands, likewise: the list needs no import of any command
    "run": "Run a whole job or sweep on this machine, without Airflow.",
    "advise": "What a budget can buy at a corpus's size, and the plan for it.",
    "epsilon": "ε of a DP-SGD training, by PLD and by RDP.",
    "calibrate": "The noise for a privacy target.",
    "audit-engine": "Try to contradict the ε of this installation's DP-SGD, on made-up data.",
    "paper-table": "The paper's figures beside what is true.",
    "ledger": "What was spent of each data set's privacy budget.",
    "report": "The latest report: its table, and where the page is.",
    "compare": "What differs between runs: settings, ε, scores, exposure.",
    "errors": "What a fine-tuned model got wrong, with the words: for the operator alone.",
    "export": "Copy a released model, to be handed on.",
    "evidence": "What a stranger needs to check a released model, in one folder.",
    "audit": "What audits say of a model's claim: of a run here, or anybody's.",
    "announce": "Tell Airflow that a private corpus has a new version.",
    "backup": "Copy the ledger, the seeds and MLflow's database.",
    "doctor": "What is missing on this machine, and how to get it.",
}


class LazyGroup(click.Group):
    """A group that imports a command's module only to run it or to show its own help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which a newcomer meets them."""
        return [*LOCAL, *COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        if cmd_name not in LOCAL | COMMANDS:
            return None
        module = f"tasks.commands.{cmd_name.replace('-', '_')}:command"
        place = f"tasks.commands.local_stack:{cmd_name}" if cmd_name in LOCAL else module
        command: click.Command = pkgutil.resolve_name(place)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list from the words above."""
        with formatter.section("Commands"):
            formatter.write_dl(list((LOCAL | COMMANDS).items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Train language models on confidential text under differential privacy, with proof."""
    if debug:
        os.environ["CONFIDE_DEBUG"] = "1"


def main() -> int:
    """Run the command line; return the exit code, an error having been said in one line."""
    try:
        code = cli.main(prog_name="confide", standalone_mode=False)
    except click.Abort:
        click.echo("confide: stopped", err=True)
        return 130
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()  # help, and no fault to name
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
    """Write an unexpected error to standard error in one line, also without memory for more."""
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

"""The command line `confide …`. A command is imported only when it is called."""

from __future__ import annotations

import os
import pkgutil
import sys

import click

from dp_core.errors import OUT_OF_MEMORY, ConfideError, fault_line

_OUT_OF_MEMORY = f"confide: {OUT_OF_MEMORY}\n".encode()

COMMANDS = {  # verb: one line of help; no command's module is imported for the list
    "demo": "Run the demo job (or another) through Airflow, and show its report.",
    "up": "Serve the Airflow and MLflow pages on this machine.",
    "down": "Stop what `up` started.",
    "announce": "Announce a new version of a private corpus to Airflow.",
    "backup": "Copy the ledger, the seeds and MLflow's database.",
    "run": "Run a whole job or sweep on this machine, without Airflow.",
    "advise": "Recommend a plan for a privacy budget and a corpus size.",
    "epsilon": "Compute ε of a DP-SGD training, by PLD and by RDP.",
    "calibrate": "Compute the noise for a privacy target.",
    "audit-engine": "Try to contradict the ε of this installation's DP-SGD, on made-up data.",
    "paper-table": "Recompute the paper's figures.",
    "ledger": "Show and register the privacy budgets of data sets.",
    "report": "Show the latest report's table and the path of its page.",
    "compare": "Compare the settings, ε, scores and exposure of runs.",
    "errors": "List a fine-tuned model's errors with their words, for the operator only.",
    "export": "Copy a released model into a folder for others.",
    "evidence": "Write the evidence with which others can check a released model.",
    "audit": "Audit a model's privacy claim: a model from here or from elsewhere.",
    "doctor": "Check this machine and deployment, and suggest fixes.",
}
# Files of several commands, by verb; the command's function has the name of the verb. Any other
# command is the function `command` of VERB_command.
_SHARED = {
    **dict.fromkeys(("demo", "up", "down", "announce", "backup"), "local_stack"),
    **dict.fromkeys(("calibrate", "paper-table"), "epsilon_command"),
    **dict.fromkeys(("audit", "audit-engine", "evidence"), "audit_command"),
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
        verb = cmd_name.replace("-", "_")
        shared = _SHARED.get(cmd_name)
        place = f"{shared}:{verb}" if shared else f"{verb}_command:command"
        command: click.Command = pkgutil.resolve_name(f"tasks.commands.{place}")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table above, without imports."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


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

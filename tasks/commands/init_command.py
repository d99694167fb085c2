"""`confide init`: looks at a file of notes and writes the settings for a first run."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from dp_core.config.privacy import LEAST_UNITS
from dp_core.data.readers.note_tables import (
    DELIMITERS,
    SUFFIXES,
    columns_of,
    header_of,
    layout_of,
    recognised,
)
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.registry import corpus_readers
from dp_core.data.readers.sources import bare_name, entries, refuse_damaged_file, text_lines
from dp_core.errors import BadInput
from tasks.commands.command_options import options
from tasks.commands.output import as_json, write_answer, write_pairs, write_prose
from tasks.commands.settings_options import absolute, validated, write_settings
from tasks.protocol.defaults import default_delta
from tasks.protocol.settings import JobSettings

EPSILON = 8  # of the commands that are shown
ROLES = ("text", "patient", "document", "date")
_STEPS = (1, 1.5, 2, 3, 4, 5, 6, 8, 10)  # first digits of a rounded bound


@click.command("init")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("settings.json"),
    show_default=True,
    help="The settings file to write.",
)
@click.option("--dataset", help="Name in the privacy ledger; by default, the name of the file.")
@options(*(click.option(f"--{role}", metavar="COLUMN", help=f"Column: {role}.") for role in ROLES))
@click.option("--delimiter", type=click.Choice(list(DELIMITERS)), help="Between cells of CSV.")
@as_json
def command(file: Path, out: Path, dataset: str | None, **given: str | None) -> None:
    """Look at a file or folder of notes, and write the settings of its data.

    The command counts notes and privacy units for you, on this machine. It spends and registers
    nothing, and shows no text. FILE is CSV, Parquet, JSON lines, or a folder of .txt files.

    Example:
      confide init notes.csv
    """
    path = Path(absolute("FILE", str(file)))
    format = _format_of(path)
    columns = {} if format == "text" else _columns(path, format, given)
    described, quarantine = _setting(columns), Quarantine()
    unit, units = _units(path, format, described, quarantine)
    if units < LEAST_UNITS:
        what = f"it has fewer than {LEAST_UNITS} {unit}s, too few to hide one of them"
        raise BadInput(what, where=str(path))
    name = re.sub(r"[^a-z0-9._-]+", "-", bare_name(path).partition(".")[0].lower()).strip("._-")
    settings = {
        "private_format": format,
        "private_path": str(path),
        "private_columns": described,
        "private_dataset": dataset or name[:64] or "notes",
        "unit": unit,
        "declared_units": _rounded_up(units),
    }
    validated(JobSettings, settings)
    write_settings(settings, out, "--out")
    found = {
        "format": format,
        **columns,
        "notes": quarantine.taken,
        "notes that cannot be used": quarantine.rejected,
        "notes marked as errors": quarantine.left_out,
        f"{unit}s": units,
    }
    budget = f"--epsilon {EPSILON} --delta {default_delta(_rounded_up(units)):g}"
    file_of_settings = shlex.quote(str(out))
    commands = [
        f"confide advise --settings {file_of_settings} {budget} --write {file_of_settings}",
        f"confide ledger register {settings['private_dataset']} --unit {unit} {budget}",
        f"confide run --settings {file_of_settings}",
    ]
    answer = {"found": found, "settings": settings, "written": str(out), "next": commands}
    write_answer(answer, lambda: _show(answer))


def _format_of(path: Path) -> str:
    """Return the format of a source, by the suffixes of its files."""
    formats = {suffix: name for name in ("csv", "parquet", "jsonl") for suffix in SUFFIXES[name]}
    formats[".txt"] = "text"
    known = Counter(formats.get(Path(bare_name(file)).suffix.lower()) for file in entries(path))
    del known[None]
    if len(known) != 1:
        raise BadInput(
            "its files have several formats" if known else "it has no file of a known format",
            where=str(path),
            fix=f"Give one file, or a folder with files of one format: {', '.join(formats)}.",
        )
    return str(known.popitem()[0])


def _columns(path: Path, format: str, given: Mapping[str, str | None]) -> dict[str, str]:
    """Return the parts of the setting `private_columns`.

    Raises:
        BadInput: there is no column of text, or several columns could have a role.
    """
    parts = {role: column for role, column in given.items() if column}
    if format == "csv" and _is_not_utf_8(path):
        parts["encoding"] = "windows-1252"
    try:
        names = header_of(path, format, layout_of(format, _setting(parts)))
        dates = recognised(names)["date"]
        if len(dates) == 1:
            parts.setdefault("date", dates[0])
        return columns_of(path, format, layout_of(format, _setting(parts))) | parts
    except BadInput as error:
        ways = f"{error.fix} Options: {', '.join(f'--{role} COLUMN' for role in ROLES)}."
        raise BadInput(error.what, where=str(path), fix=ways) from None


def _setting(parts: Mapping[str, str]) -> str:
    return ",".join(f"{part}:{value}" for part, value in parts.items())


def _is_not_utf_8(path: Path) -> bool:
    for file in entries(path):
        with refuse_damaged_file(path, file, Quarantine()):
            if any(line is Reason.ENCODING for _, line in text_lines(file)):
                return True
    return False


def _units(path: Path, format: str, columns: str, quarantine: Quarantine) -> tuple[str, int]:
    """Return the unit that a source can protect, and the number of its units; for the operator.

    Raises:
        BadInput: the source cannot be read.
    """
    patients, nameless, documents = set[str](), 0, set[tuple[str, str]]()
    for document in corpus_readers(columns)[format](path, quarantine):
        patients.add(document.patient_id)
        nameless += not document.document_id
        documents.add((document.patient_id, document.document_id))
    quarantine.finish(str(path))
    if "" not in patients:
        return "patient", len(patients)
    return "document", nameless + sum(bool(document) for _, document in documents)


def _rounded_up(units: int) -> int:
    """Return the next round number above a count, which many counts share."""
    size = 10 ** (len(str(units)) - 1)
    return next(bound for step in _STEPS if (bound := int(step * size)) > units)


def _show(answer: Mapping[str, Any]) -> None:
    settings = answer["settings"]
    write_pairs(settings["private_path"], answer["found"])
    write_prose(
        f"declared_units is {settings['declared_units']:,}. This bound becomes public: it is "
        "rounded up, and does not tell the exact number. Change it if you know a better one."
    )
    write_prose(
        f"Written: {answer['written']}. Nothing is spent or registered. Next, with an ε of your "
        "choice for everything together:"
    )
    for line in answer["next"]:
        click.echo(f"  {line}")

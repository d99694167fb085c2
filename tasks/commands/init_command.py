"""`confide init`: looks at a file of notes and writes the settings for a first run."""

import re
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import click

from dp_core.config.privacy import LEAST_UNITS
from dp_core.data.privacy_units import refuse_more_than_declared
from dp_core.data.readers.note_tables import DELIMITERS, SUFFIXES, header_of, layout_of
from dp_core.data.readers.quarantine import Quarantine
from dp_core.data.readers.registry import corpus_readers
from dp_core.data.readers.sources import bare_name, entries
from dp_core.errors import BadInput
from tasks.commands.command_options import options, options_of
from tasks.commands.output import as_json, write_answer, write_pairs, write_prose
from tasks.commands.settings_options import absolute, validated, write_settings
from tasks.protocol.defaults import default_delta
from tasks.protocol.settings import JobSettings

EPSILON = 8  # of the commands that are shown
ROLES = ("text", "patient", "document", "date")


@click.command("init")
@click.argument("file", type=click.Path(path_type=Path))
@options_of("init")
@options(
    *(click.option(f"--{role}", metavar="COLUMN", help=f"Column of the {role}.") for role in ROLES)
)
@click.option("--delimiter", type=click.Choice(list(DELIMITERS)), help="Delimiter of CSV.")
@click.option("--encoding", type=click.Choice(["utf-8", "windows-1252"]), help="Encoding of CSV.")
@as_json
def command(
    file: Path, units: int | None, out: Path, dataset: str | None, **given: str | None
) -> None:
    """Look at a file or folder of notes, and write the settings of its data.

    The command counts notes and privacy units for you, on this machine. It spends and registers
    nothing, and shows no text. FILE is CSV, Parquet, JSON lines, or a folder of .txt files.

    Settings and shown commands follow from --units, never from the count: a public number that
    followed from it, even rounded, could change with one patient.

    Example:
      confide init notes.csv --units 1000
    """
    path = Path(absolute("FILE", str(file)))
    source = NoteSource.of(path, given)
    unit, count = next(iter(source.units.items()))
    if units is None:
        raise BadInput(
            f"it has {count:,} {unit}s, and no public number may follow from this count",
            where=str(path),
            fix=f"Give --units N: a bound on the number of {unit}s that people know without the "
            "texts, for example all that the ward can have had in these years.",
        )
    refuse_more_than_declared(count, units)
    name = re.sub(r"[^a-z0-9._-]+", "-", bare_name(path).partition(".")[0].lower()).strip("._-")
    settings = {
        **source.settings,
        "private_dataset": dataset or name[:64] or "notes",
        "unit": unit,
        "declared_units": units,
    }
    validated(JobSettings, settings)
    write_settings(settings, out, "--out")
    properties = {
        "format": source.format,
        **source.columns,
        "notes": source.quarantine.taken,
        "notes that cannot be used": source.quarantine.rejected,
        **{str(reason): number for reason, number in source.quarantine.counts.items()},
        "notes marked as errors": source.quarantine.left_out,
        f"{unit}s": count,
    }
    budget = f"--epsilon {EPSILON} --delta {default_delta(units):g}"
    file_of_settings = shlex.quote(str(out))
    commands = [
        f"confide advise --settings {file_of_settings} {budget} --write {file_of_settings}",
        f"confide ledger register {settings['private_dataset']} --unit {unit} {budget}",
        f"confide run --settings {file_of_settings}",
    ]
    answer = {"found": properties, "settings": settings, "written": str(out), "next": commands}
    write_answer(answer, lambda: _show(answer))


@dataclass(frozen=True)
class NoteSource:
    """A file or folder of notes, as its header and one reading show it to the operator.

    Attributes:
        path, format: its place and its format.
        columns: parts of the setting `private_columns`; empty for a folder of texts.
        units: number of its units by kind; patients, if every note names one, come first.
        quarantine: counts of its notes, and of those that cannot be used.
        texts: digest of the set of its texts; order, format and names do not change it.
    """

    path: Path
    format: str
    columns: Mapping[str, str]
    units: Mapping[str, int]
    quarantine: Quarantine
    texts: str

    @classmethod
    def of(cls, path: Path, given: Mapping[str, str | None]) -> Self:
        """Read a source, whose columns may be given by role.

        Raises:
            BadInput: it cannot be read, lacks a column, or has too few units to hide one of them.
        """
        format, quarantine = format_of(path), Quarantine()
        columns = {} if format == "text" else _columns(path, format, given)
        patients, nameless, documents = set[str](), 0, set[tuple[str, str]]()
        texts = set[bytes]()
        for document in corpus_readers(_setting(columns))[format](path, quarantine):
            patients.add(document.patient_id)
            nameless += not document.document_id
            documents.add((document.patient_id, document.document_id))
            texts.add(sha256(document.text.encode()).digest())
        quarantine.finish(str(path))
        if "" in patients and len(patients) > 1:  # one note would change the unit of all
            fix = "Name the column of patients, or give each text file the folder of its patient."
            raise BadInput("only some notes name a patient", where=str(path), fix=fix)
        units = {"document": nameless + sum(bool(document) for _, document in documents)}
        if "" not in patients:
            units = {"patient": len(patients), **units}
        unit, number = next(iter(units.items()))
        if number < LEAST_UNITS:
            what = f"it has fewer than {LEAST_UNITS} {unit}s, too few to hide one of them"
            raise BadInput(what, where=str(path), fix="Give each note its own row or file.")
        digest = sha256(b"".join(sorted(texts))).hexdigest()
        return cls(path, format, columns, units, quarantine, digest)

    @property
    def settings(self) -> dict[str, str]:
        """The settings of the private corpus that read this source."""
        return {
            "private_format": self.format,
            "private_path": str(self.path),
            "private_columns": _setting(self.columns),
        }


def format_of(path: Path) -> str:
    """Return the format of a source, by the suffixes of its files."""
    formats = {suffix: name for name in ("csv", "parquet", "jsonl") for suffix in SUFFIXES[name]}
    formats[".txt"] = "text"
    known = Counter(formats.get(Path(bare_name(file)).suffix.lower()) for file in entries(path))
    del known[None]
    if len(known) != 1:
        what = "its files have several formats" if known else "it has no file of a known format"
        fix = f"Give one file, or a folder with files of one format: {', '.join(formats)}."
        raise BadInput(what, where=str(path), fix=fix)
    return str(known.popitem()[0])


def _columns(path: Path, format: str, given: Mapping[str, str | None]) -> dict[str, str]:
    """Return the parts of the setting `private_columns`, which never follow from the rows.

    Raises:
        BadInput: there is no column of text, or several columns could have a role.
    """
    parts = {role: column for role, column in given.items() if column}
    validated(JobSettings, {"private_columns": _setting(parts)})
    layout, names = layout_of(format, _setting(parts)), list[str]()
    try:
        names = header_of(path, format, layout)
        # If no line holds an object, the reading of all lines gives the reason.
        columns = layout.with_date(names) if names or format != "jsonl" else {}
    except BadInput as error:
        options = ", ".join(f"--{role} COLUMN" for role in ROLES)
        ways = f' Options: {options}; in Python: text="COLUMN".' if names else ""
        raise BadInput(error.what, where=str(path), fix=error.fix + ways) from None
    if format == "jsonl":
        # Objects without a text or a patient are rejected. Any other key of one object must not
        # name a column, because those without it would be read in another way.
        columns = {role: columns[role] for role in ("text", "patient") if role in columns}
    return columns | parts


def _setting(parts: Mapping[str, str]) -> str:
    return ",".join(f"{part}:{value}" for part, value in parts.items())


def _show(answer: Mapping[str, Any]) -> None:
    settings = answer["settings"]
    write_pairs(settings["private_path"], answer["found"])
    if settings["unit"] == "document":
        write_prose(
            "No column or folder names patients, so each document is protected alone, and not all "
            "notes of a patient together. --patient COLUMN, or folders of patients, change this."
        )
    write_prose(
        f"declared_units is {settings['declared_units']:,}, as you declared. It becomes public; "
        f"the counts above are for you alone. Written: {answer['written']}. Nothing is spent or "
        "registered. Next, with an ε of your choice for everything together:"
    )
    for line in answer["next"]:
        click.echo(f"  {line}")

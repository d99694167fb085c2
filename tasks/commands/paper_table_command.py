"""`confide paper-table`: recomputes the figures of Hoory et al. 2021."""

from __future__ import annotations

from dataclasses import asdict

import click

from tasks.commands.output import as_json, write_json, write_table


@click.command("paper-table")
@as_json
def command(as_json: bool) -> None:
    """Recompute the paper's figures: the printed value and the true one for its parameters."""
    from dp_core.vocabulary.hoory2021 import paper_table

    rows = paper_table()
    if as_json:
        write_json([asdict(row) for row in rows])
        return
    write_table(
        "Hoory et al. 2021, recomputed",
        ["figure", "from", "printed", "true", "verdict"],
        [
            [
                row.figure,
                ", ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}"
                          for k, v in row.parameters.items()),
                row.printed,
                row.true,
                row.verdict,
            ]
            for row in rows
        ],
    )  # fmt: skip

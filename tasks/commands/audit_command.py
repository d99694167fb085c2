"""`confide audit`: audits a model's privacy claim by canaries and texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import ValidationError

from dp_core.config.audit_settings import BlackBoxAuditConfig
from dp_core.config.fields import one_line
from dp_core.errors import BadInput, Contradicted
from tasks.commands.export_command import latest_model
from tasks.commands.output import as_json, write_json, write_table
from tasks.commands.report_command import given
from tasks.results import read_result
from tasks.runtime.deployment import Deployment

if TYPE_CHECKING:
    from dp_core.audit.protocol import AuditRecord

_FILE = click.Path(path_type=Path)


@click.command("audit")
@click.argument("model", required=False, type=_FILE)
@click.option("--uri", default="", help="A training step's output, in place of MODEL.")
@click.option("--canaries", type=_FILE, help="Lines of text with the secret in [[brackets]].")
@click.option("--members", type=_FILE, help="Texts that trained the model, one per line.")
@click.option(
    "--held-out",
    type=_FILE,
    help="Texts of the same distribution that did not train the model, one per line.",
)
@click.option(
    "--coins",
    is_flag=True,
    help="A fair coin put each text, a whole unit, in or out: gives a lower bound on ε.",
)
@click.option("--epsilon", type=float, help="Claimed ε for one text, for a model from elsewhere.")
@click.option("--delta", type=float, help="δ of that claim.")
@click.option("--masks", type=click.IntRange(1, 256), default=4, show_default=True)
@click.option("--prefix", type=int, help="Tokens of a text that prompt a causal model.")
@click.option("--suffix", type=int, help="Tokens after the prefix that must be extracted.")
@click.option("--top-k", type=int, help="Guesses for a secret; also top-k of sampling.")
@click.option("--tries", type=int, help="Texts to sample for each prefix.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Public.")
@as_json
def command(
    model: Path | None,
    uri: str,
    canaries: Path | None,
    members: Path | None,
    held_out: Path | None,
    coins: bool,
    epsilon: float | None,
    delta: float | None,
    masks: int,
    seed: int,
    as_json: bool,
    **protocol: int | None,
) -> None:
    """Audit a model: from a run here, exported, or from elsewhere in Hugging Face's layout.

    MODEL is a folder. Without MODEL and --uri, the model of the latest report is audited. If the
    model was trained here, the table begins with the audits of its runs. Findings with --canaries,
    --members and --held-out are for the operator; for a causal model, they include extraction. The
    exit code is 4 if an audit contradicts the claim.
    """
    if model is not None and uri:
        raise BadInput("two models are named", where="audit", fix="Give MODEL or --uri.")
    if (members is None) != (held_out is None):
        raise BadInput("one side is missing", where="audit", fix="Give --members and --held-out.")
    if (epsilon is None) != (delta is None):
        raise BadInput("half a claim", where="audit", fix="Give --epsilon and --delta.")
    if coins and members is None:
        raise BadInput("coins divide texts", where="audit", fix="Give --members and --held-out.")
    from dp_core.audit import black_box
    from dp_core.audit.protocol import verdict_of
    from dp_core.privacy.accounting.tradeoff import PrivacyProfile
    from tasks.evidence.audits import bearing, claim_of, profile_of, records_of
    from tasks.releases.provenance import find_origin

    deployment = Deployment.from_environment()
    store = deployment.open_store()
    if model is None:
        uri = given(store, uri) if uri else latest_model(store, "audit")
    else:
        uri = find_origin(store, model) or ""
    result = read_result(store, uri) if uri else None
    if uri and result is None:
        raise BadInput("no model there", where=uri, fix="Give a training step's output.")
    if result is not None and epsilon is not None:
        raise BadInput("the model was trained here and has its claim already", where="--epsilon")
    records = list(records_of(store, uri, result)) if result else []
    folder = model if model is not None else store.local_copy(uri)
    if canaries or members:
        ceiling = profile_of(result.releases) if result is not None else None
        if epsilon is not None and delta is not None:
            ceiling = PrivacyProfile.of_claim(epsilon, delta)
        named = {"canaries": canaries, "members": members, "held_out": held_out}
        files = {name: file for name, file in named.items() if file is not None}
        chosen = {f"extraction_{name}": value for name, value in protocol.items()}
        config = _config(
            {
                "audited_model": str(folder),
                **{f"given_{name}": str(file) for name, file in files.items()},
                "given_coins": coins,
                "given_masks": masks,
                "seed": seed,
                **{name: value for name, value in chosen.items() if value is not None},
            }
        )
        findings = black_box.audit_files(
            folder, files, lambda name: f"--{name.replace('_', '-')} {files[name]}", ceiling, config
        )
        records += [finding.record for finding in findings]
    if not records:
        raise BadInput(
            "there is nothing to audit it by",
            where="audit",
            fix="Give --canaries, or --members and --held-out.",
        )
    claim = "no claim is known"
    if result is not None:
        claim = claim_of(result.releases)
    elif epsilon is not None:
        claim = f"ε = {epsilon:g} at δ = {delta:g}, as given"
    verdict = verdict_of(claim, bearing(records) if result is not None else records)
    if as_json:
        write_json(
            {
                "claim": claim,
                "verdict": verdict.word,
                "sentence": verdict.sentence,
                "audits": [record.model_dump(mode="json") for record in records],
            }
        )
    else:
        _show(records, claim)
        click.echo(verdict.sentence)
    if verdict.word == "contradicted":
        raise Contradicted(verdict.sentence, where="audit", fix="Do not release the model.")


def _config(settings: Mapping[str, Any]) -> BlackBoxAuditConfig:
    try:
        return BlackBoxAuditConfig.model_validate(settings)
    except ValidationError as error:
        raise BadInput(one_line(error), where="audit") from None


def _show(records: Sequence[AuditRecord], claim: str) -> None:
    write_table(
        f"Audits of the model. Claim: {claim}",
        ["audit", "level", "value", "interval", "at most", "could find", "verdict", "for"],
        [
            [
                record.name,
                record.level,
                record.value,
                "–" if record.interval is None else "{:.3g} … {:.3g}".format(*record.interval),
                record.ceiling,
                record.power or record.finding,
                record.verdict,
                record.label.value,
            ]
            for record in records
        ],
        whole=["verdict"],
        prose=["could find", "level"],
    )

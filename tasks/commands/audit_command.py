"""`confide audit`, `audit-engine` and `evidence`: audits of claims, and their evidence."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dp_core.config.audit_settings import BlackBoxAuditConfig
from dp_core.errors import BadInput, ConfideError, Contradicted
from tasks.commands import output
from tasks.commands.command_options import options_of
from tasks.commands.export_command import chosen_model
from tasks.commands.settings_options import validated
from tasks.protocol.settings_file import read_object
from tasks.results import read_result
from tasks.runtime.deployment import Deployment
from tasks.storage.store import sha256_of

if TYPE_CHECKING:  # imports that cost seconds, and options are checked first
    from dp_core.audit.one_run import AuditVerdict
    from dp_core.audit.protocol import AuditRecord

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("model", required=False, type=_FILE)
@options_of("audit")
@output.as_json
def audit(
    model: Path | None, uri: str, epsilon: float | None, delta: float | None, **given: Any
) -> None:
    """Audit a model: from a run here, exported, or from elsewhere in Hugging Face's layout.

    MODEL is a folder. Without MODEL and --uri, the model of the latest report is audited. If the
    model was trained here, the table begins with the audits of its runs. Findings with --canaries,
    --members and --held-out are for the operator; for a causal model, they include extraction. The
    exit code is 4 if an audit contradicts the claim.

    Example:
      confide audit ward-model
      confide audit some-model --canaries canaries.txt
      confide audit some-model --members in.txt --held-out out.txt
    """
    texts = ("canaries", "members", "held_out")
    files = {name: Path(file) for name in texts if (file := given[f"given_{name}"])}
    if model is not None and uri:
        raise BadInput("two models are named", where="audit", fix="Give MODEL or --uri.")
    if ("members" in files) != ("held_out" in files):
        raise BadInput("one side is missing", where="audit", fix="Give --members and --held-out.")
    if (epsilon is None) != (delta is None):
        raise BadInput("half a claim", where="audit", fix="Give --epsilon and --delta.")
    if given["given_coins"] and "members" not in files:
        raise BadInput("coins divide texts", where="audit", fix="Give --members and --held-out.")
    if model is not None and not model.is_dir():
        raise BadInput("no folder there", where=str(model), fix="Give the folder of a model.")
    from dp_core.audit import black_box
    from dp_core.audit.protocol import verdict_of
    from dp_core.privacy.accounting.tradeoff import PrivacyProfile
    from tasks.evidence.audits import claim_of, profile_of, records_of, verdict_from
    from tasks.releases.provenance import find_origin

    store = Deployment.from_environment().open_store()
    if model is None:
        uri = chosen_model(store, uri, "audit")
    else:
        uri = find_origin(store, model) or ""
    result = read_result(store, uri) if uri else None
    if uri and result is None:
        raise BadInput("no model there", where=uri, fix="Give a training step's output.")
    if result is not None and epsilon is not None:
        raise BadInput("the model was trained here and has its claim already", where="--epsilon")
    records, claim, ceiling = [], "no claim is known", None
    if result is not None:
        records, claim = list(records_of(store, uri, result)), claim_of(result.releases)
        ceiling = profile_of(result.releases) if files else None
    elif epsilon is not None and delta is not None:
        claim = f"ε = {epsilon:g} at δ = {delta:g}, as given"
        ceiling = PrivacyProfile.of_claim(epsilon, delta)
    if files:
        folder = model if model is not None else store.local_copy(uri)
        options = {name: value for name, value in given.items() if value is not None}
        options["audited_model"] = str(folder)
        config = validated(BlackBoxAuditConfig, options, "audit")
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
    verdict = verdict_of(claim, records) if result is None else verdict_from(result, records)
    answer = {
        "claim": claim,
        "verdict": verdict.word,
        "sentence": verdict.sentence,
        "audits": [record.model_dump(mode="json") for record in records],
    }
    output.write_answer(answer, lambda: _show(records, claim, verdict.sentence))
    if verdict.word == "contradicted":
        raise Contradicted(verdict.sentence, where="audit", fix="Do not release the model.")


# By whether an audit bounds the claim: a lower bound on ε has no upper end.
_INTERVAL = {False: "{:.3g} … {:.3g}", True: "≥ {:.3g}"}


def _show(records: Sequence[AuditRecord], claim: str, sentence: str) -> None:
    columns = {
        "audit": lambda r: r.name,
        "level": lambda r: r.level,
        "value": lambda r: r.value,
        "interval": lambda r: r.interval and _INTERVAL[r.bounds_claim].format(*r.interval),
        "at most": lambda r: r.ceiling,
        "could find": lambda r: r.power or r.finding,
        "verdict": lambda r: r.verdict,
        "for": lambda r: r.label.value,
    }
    output.write_records(f"Audits of the model. Claim: {claim}", columns, records)
    output.write_prose(sentence)


# --- audits of this installation


@click.command(context_settings={"show_default": True})
@options_of("audit-engine")
@output.as_json
def audit_engine(
    epsilon: float,
    delta: float,
    updates: int,
    sampling_rate: float,
    white_box_canaries: int,
    black_box_canaries: int,
) -> None:
    """Audit this installation's DP-SGD in one training run each, on made-up data.

    The white-box audit reads canaries with Dirac gradients from the noised sums. The black-box
    audit reads separate canary tokens from the released weights. The audit has no privacy cost and
    takes a few minutes. The exit code is 1 if the claim is contradicted.

    Example:
      confide audit-engine --epsilon 2
    """
    most = max(white_box_canaries, black_box_canaries)
    if most == 0:
        raise BadInput(
            "there is nothing to audit", where="canaries", fix="Set a number of canaries."
        )
    if not 0 < delta < 1 / (1.1 * most + 1000):
        raise BadInput(
            f"{delta:g} is not above 0 and well below 1/{most}, one in the number of canaries",
            where="--delta",
        )
    from dp_core.audit import engine_audit
    from dp_core.audit.canaries import throw_coins
    from dp_core.audit.one_run import Claim, audit_claim, planned_guesses
    from dp_core.privacy.seed_store import PrivacySeed

    def audited(kind: str, canaries: Any) -> AuditVerdict:
        coins_of, training = PrivacySeed.draw(), PrivacySeed.draw()
        coins = throw_coins(coins_of, canaries.count)
        plan = engine_audit.audited_plan(
            canaries.units, epsilon, delta, sampling_rate=sampling_rate, steps=updates
        )
        if kind == "white-box":
            seen = engine_audit.white_box_observations(canaries, plan, coins, training)
            scores = engine_audit.white_box_scores(plan, seen)
        else:
            scores = [engine_audit.black_box_scores(canaries, plan, coins, training)]
        claim = Claim.of_event(plan.event(), plan.delta)
        return audit_claim(claim, scores, coins, planned_guesses(canaries.count, epsilon), coins_of)

    verdicts: dict[str, AuditVerdict] = {}
    if white_box_canaries:
        dirac = engine_audit.DiracCanaries.at_least(white_box_canaries)
        verdicts["white-box"] = audited("white-box", dirac)
    if black_box_canaries:
        tokens = engine_audit.NewTokenCanaries(black_box_canaries)
        verdicts["black-box"] = audited("black-box", tokens)
    answer = {kind: _figures(verdict) for kind, verdict in verdicts.items()}
    output.write_answer(answer, lambda: _show_engine(verdicts))
    for kind, verdict in verdicts.items():
        if verdict.word in ("contradicted", "invalid"):
            raise ConfideError(
                f"{verdict.outcome.right} of {verdict.outcome.guesses} guesses were right: the "
                f"claim of ε = {verdict.claim.epsilon:.4g} is {verdict.word}, p = "
                f"{verdict.p_value:.2g}",
                where=f"{kind} audit",
                fix="Do not train on confidential text with this installation; report it.",
            )


def _figures(verdict: AuditVerdict) -> dict[str, Any]:
    figures = asdict(verdict) | {"verdict": verdict.word}
    claim, outcome = figures.pop("claim"), figures.pop("outcome")
    return {"epsilon": claim["epsilon"], "delta": claim["delta"], **outcome, **figures}


def _show_engine(verdicts: Mapping[str, AuditVerdict]) -> None:
    from dp_core.audit.one_run import CONFIDENCE, NULL_REPEATS, SIGNIFICANCE

    for kind, verdict in verdicts.items():
        bounds, power = verdict.lower_bounds.items(), verdict.power.items()
        output.write_pairs(
            f"{kind} audit of ε = {verdict.claim.epsilon:.4g} at δ = {verdict.claim.delta:g}. "
            f"Bounds and power at {CONFIDENCE:.0%}; contradicted at p ≤ {SIGNIFICANCE:g}",
            {
                "canaries": verdict.outcome.canaries,
                "guesses, fixed beforehand": verdict.outcome.guesses,
                "right": verdict.outcome.right,
                **{f"ε at least, {name} bound": epsilon for name, epsilon in bounds},
                **{f"ε it could refute, {name} bound": epsilon for name, epsilon in power},
                "p-value of the claim": verdict.p_value,
                "null control: alarms": f"{verdict.null_alarms} of {NULL_REPEATS}",
                "verdict": verdict.word,
            },
        )


# --- evidence packs


@click.command()
@click.argument("model", required=False, type=_FILE)
@options_of("evidence")
@output.as_json
def evidence(
    model: Path | None, uri: str, out: Path, operator: bool, words: Path | None, check: Path | None
) -> int:
    """Write the evidence pack of a model: claim, ledger, audits, and a script that checks them.

    MODEL is a folder written by `confide export`. Without MODEL and --uri, the model of the latest
    report is used. The pack is for a data-protection officer, an ethics board or an auditor:
    evidence.html is for people; evidence.json and check_evidence.py check it without Confide.

    Example:
      confide evidence ward-model --out ward-evidence
      confide evidence ward-model --check ward-evidence
    """
    if check is not None:
        return _check_pack(check, model)
    from tasks.evidence.pack import write_pack
    from tasks.releases.provenance import origin_of_export

    if model is not None and uri:
        raise BadInput("two models are named", where="evidence", fix="Give MODEL or --uri.")
    statements = _operator_words(words)
    deployment = Deployment.from_environment()
    store = deployment.open_store()
    if model is not None:
        uri = origin_of_export(store, model)
    else:
        uri = chosen_model(store, uri, "evidence")
    if operator:
        os.umask(0o077)
    with output.new_folder(out) as partial:
        write_pack(deployment, store, uri, partial, operator=operator, words=statements)
    digest = sha256_of(out / "evidence.json")
    lines = [
        f"{out / 'evidence.html'}: the page. Anyone checks it: {out}/check_evidence.py",
        f"SHA-256 of evidence.json, to be sent by another channel: {digest}",
        *(["Operator edition: do not hand it on."] if operator else []),
    ]
    answer = {"folder": str(out), "uri": uri, "sha256": digest}
    output.write_answer(answer, lambda: click.echo("\n".join(lines)))
    return 0


def _check_pack(folder: Path, model: Path | None) -> int:
    """Check a pack by the installed copy of its script; the pack's copy may have been changed."""
    from dp_core.privacy import check_evidence

    try:
        findings = check_evidence.check(folder, model)
    except check_evidence.NotAPackError as error:
        raise BadInput("no evidence pack", where=str(folder), fix=f"{error}.") from None
    shown = check_evidence.as_json if output.is_json() else check_evidence.as_text
    click.echo(shown(findings), nl=False)
    return findings.code


def _operator_words(file: Path | None) -> dict[str, str]:
    """Return the operator's statements in a JSON file.

    Raises:
        BadInput: it cannot be read, or contains anything else.
    """
    from dp_core.privacy.check_evidence import OPERATOR_WORDS

    if file is None:
        return {}
    where, fix = f"--words {file}", f"Give JSON with some of: {', '.join(OPERATOR_WORDS)}."
    statements = read_object(file, where)
    for name, words in statements.items():
        if name not in OPERATOR_WORDS or not isinstance(words, str):
            raise BadInput(f"{name!r} is not a statement in words", where=where, fix=fix)
    return statements

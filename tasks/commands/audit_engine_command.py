"""`confide audit-engine`: train on made-up canaries, and try to contradict the claimed ε."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dp_core.errors import BadInput, ConfideError
from tasks.commands.output import as_json, write_json, write_table

if TYPE_CHECKING:  # its import costs seconds, and options are checked first
    from dp_core.audit.one_run import AuditVerdict

_SHARE = {"white-box": 0.02, "black-box": 0.04}  # of the canaries that are guessed to be in


@click.command("audit-engine")
@click.option("--epsilon", type=float, default=4.0, show_default=True, help="ε that is claimed.")
@click.option("--delta", type=float, default=1e-5, show_default=True, help="δ of the claim.")
@click.option("--updates", type=int, default=12, show_default=True, help="Updates of a training.")
@click.option(
    "--sampling-rate", type=float, default=0.5, show_default=True, help="Of every update."
)
@click.option(
    "--white-box-canaries", type=int, default=20_000, show_default=True, help="0: no white box."
)
@click.option(
    "--black-box-canaries", type=int, default=4_000, show_default=True, help="0: no black box."
)
@as_json
def command(
    epsilon: float,
    delta: float,
    updates: int,
    sampling_rate: float,
    white_box_canaries: int,
    black_box_canaries: int,
    as_json: bool,
) -> None:
    """Audit this installation's DP-SGD in one training run each, on made-up data.

    The white-box audit reads canaries with Dirac gradients from the noised sums. The black-box
    audit reads separate canary tokens from the released weights. The audit has no privacy cost and
    takes a few minutes. The exit code is 1 if the claim is contradicted.
    """
    _check(epsilon, delta, updates, sampling_rate, white_box_canaries, black_box_canaries)
    from dp_core.audit import engine_audit
    from dp_core.audit.canaries import throw_coins
    from dp_core.audit.one_run import Guesses, audit_claim
    from dp_core.privacy.seed_store import PrivacySeed

    def audited(kind: str, canaries: Any, count: int, units: int) -> AuditVerdict:
        coins_of, training = PrivacySeed.draw(), PrivacySeed.draw()
        coins = throw_coins(coins_of, count)
        plan = engine_audit.audited_plan(
            units, epsilon, delta, sampling_rate=sampling_rate, steps=updates
        )
        if kind == "white-box":
            seen = engine_audit.white_box_observations(canaries, plan, coins, training)
            scores = engine_audit.white_box_scores(plan, seen)
        else:
            scores = [engine_audit.black_box_scores(canaries, plan, coins, training)]
        guesses = Guesses(max(1, round(_SHARE[kind] * count)), 0)
        return audit_claim(engine_audit.claim_of(plan), scores, coins, guesses, coins_of)

    verdicts: dict[str, AuditVerdict] = {}
    if white_box_canaries:
        dirac = engine_audit.DiracCanaries.at_least(white_box_canaries)
        verdicts["white-box"] = audited("white-box", dirac, dirac.count, dirac.count)
    if black_box_canaries:
        tokens = engine_audit.NewTokenCanaries(black_box_canaries)
        verdicts["black-box"] = audited("black-box", tokens, tokens.count, tokens.units)
    if as_json:
        write_json({k: asdict(v) | {"verdict": v.word} for k, v in verdicts.items()})
    else:
        _show(verdicts)
    for kind, verdict in verdicts.items():
        if verdict.word != "consistent":
            raise ConfideError(
                f"{verdict.right} of {verdict.guesses} guesses were right: the claim of "
                f"ε = {verdict.epsilon:.4g} is {verdict.word}, p = {verdict.p_value:.2g}",
                where=f"{kind} audit",
                fix="Do not train on confidential text with this installation; report it.",
            )


def _show(verdicts: Mapping[str, AuditVerdict]) -> None:
    columns = [_column(verdict) for verdict in verdicts.values()]
    first = next(iter(verdicts.values()))
    write_table(
        f"Claimed: ε = {first.epsilon:.4g} at δ = {first.delta:g}. Bounds and power at "
        f"{first.confidence:.0%}; contradicted at p ≤ {first.significance:g}",
        ["", *verdicts],
        [[name, *(column[name] for column in columns)] for name in columns[0]],
    )


def _column(verdict: AuditVerdict) -> dict[str, object]:
    bounds, power = verdict.lower_bounds.items(), verdict.power.items()
    return {
        "canaries": verdict.canaries,
        "guesses, fixed beforehand": verdict.guesses,
        "right": verdict.right,
        **{f"ε at least, {name} bound": epsilon for name, epsilon in bounds},
        **{f"ε it could refute, {name} bound": epsilon for name, epsilon in power},
        "p-value of the claim": verdict.p_value,
        "null control: alarms": f"{verdict.null.alarms} of {verdict.null.repeats}",
        "verdict": verdict.word,
    }


def _check(
    epsilon: float,
    delta: float,
    updates: int,
    sampling_rate: float,
    white_box_canaries: int,
    black_box_canaries: int,
) -> None:
    """Refuse what no audit can be made of."""
    for name, value, low, high in (
        ("--epsilon", epsilon, 0.01, 20.0),
        ("--updates", updates, 1, 10_000),
        ("--sampling-rate", sampling_rate, 1e-4, 1.0),
        ("--white-box-canaries", white_box_canaries, 0, 1_000_000),
        ("--black-box-canaries", black_box_canaries, 0, 60_000),
    ):
        if not low <= value <= high:
            raise BadInput(f"{value:g} is not from {low:g} to {high:g}", where=name)
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

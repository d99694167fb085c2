"""What every exported model carries: its privacy, in words and as data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dp_core.privacy.accounting import compose, epsilon_pld
from dp_core.privacy.events import MechanismEvent, PoissonGaussian, ThresholdedHistogram
from dp_core.report.model import Statement
from tasks.specs import ReleaseRecord

WORDS, DATA = "PRIVACY.md", "privacy_statement.json"

_OPERATOR = """# Not private

This model was trained on private text **without privacy**: its ε is infinite. It stays with the
operator of the data, who compares with it. It must not be exported, published or promoted.
"""


def write_statement(folder: Path, releases: Sequence[ReleaseRecord], *, made_up: bool) -> None:
    """Write the statement of everything that the folder's model was made from."""
    events = [MechanismEvent.from_json(r.event) for r in releases]
    delta = sum(r.delta for r in releases)
    total = epsilon_pld(compose(*events), delta)
    data = {
        "unit": releases[0].unit,
        "epsilon": total,
        "delta": delta,
        "made_up": made_up,
        "releases": [r.model_dump(mode="json") for r in releases],
    }
    (folder / DATA).write_text(json.dumps(data, indent=1) + "\n")
    (folder / WORDS).write_text(f"# Privacy\n\nε = {total:.3g}, δ = {delta:.2g} per unit.\n")


def write_operator_notice(folder: Path) -> None:
    """Say in the folder of a model without privacy that it is one."""
    (folder / WORDS).write_text(_OPERATOR)
    (folder / DATA).write_text(json.dumps({"private": False, "epsilon": "inf"}, indent=1) + "\n")


def statement_of(releases: Sequence[ReleaseRecord], *, made_up: bool) -> Statement:
    """Return the statement as the report shows it."""
    events = [MechanismEvent.from_json(r.event) for r in releases]
    delta = sum(r.delta for r in releases)
    return Statement((f"eps {epsilon_pld(compose(*events), delta)}",), {})


def describe(event: MechanismEvent) -> tuple[str, str]:
    """Return what was released, and by which mechanism, in words."""
    match event:
        case ThresholdedHistogram(words_per_unit=words, sigma=sigma, threshold=threshold):
            said = f"discrete Gaussian σ = {sigma:g} on each word, threshold {threshold:g}"
            return "word histogram", f"{said}, {words} words per unit"
        case PoissonGaussian(phases=phases):
            said = "; then ".join(
                f"{steps} updates, sampling rate {rate:.4g}, σ = {sigma:g}"
                for rate, sigma, steps in phases
            )
            return "DP pre-training", f"DP-SGD, Poisson sampling: {said}"
        case _:
            return event.kind.replace("_", " "), event.kind

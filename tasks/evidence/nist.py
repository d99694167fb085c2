"""The points of NIST SP 800-226, Guidelines for Evaluating Differential Privacy Guarantees (2025).

Its pyramid: a guarantee (ε, the unit) is worth what the algorithms under it are, and these what
the deployment under them is. What software cannot know is the operator's to say, and is said to
be missing where nobody said it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from tasks.evidence.model import Claim, NistField, OperatorWords

Level = Literal["guarantee", "algorithms", "deployment"]


def nist_fields(claims: Sequence[Claim], words: OperatorWords) -> tuple[NistField, ...]:
    """Return an answer to each point, of the claims and the operator's words."""
    return tuple(
        NistField(level=level, field=field, answer=answer)
        for level, field, answer in (
            *_guarantee(claims),
            *_algorithms(claims),
            *_deployment(words),
        )
    )


def _guarantee(claims: Sequence[Claim]) -> list[tuple[Level, str, str]]:
    return [
        ("guarantee", "Privacy parameters ε and δ", _each(claims, _parameters)),
        (
            "guarantee",
            "Privacy unit",
            _each(claims, lambda c: f"one {c.unit} (bounded before anything is read)"),
        ),
        ("guarantee", "Neighbouring relation", _each(claims, lambda c: c.neighbours)),
        (
            "guarantee",
            "Variant of differential privacy",
            "(ε, δ), from composed privacy loss distributions, in both directions; Rényi beside it",
        ),
        (
            "guarantee",
            "Size of the data, which is private",
            _each(
                claims,
                lambda c: (
                    "not recorded"
                    if c.declared_units is None
                    else f"at most {c.declared_units} declared, a public bound"
                ),
            ),
        ),
        ("guarantee", "Composition", _each(claims, lambda c: c.composition)),
        (
            "guarantee",
            "Privacy budget",
            "each data set's ledger, in ledger.json: every release that was ever charged to it",
        ),
    ]


def _algorithms(claims: Sequence[Claim]) -> list[tuple[Level, str, str]]:
    releases = [release for claim in claims for release in claim.releases]
    return [
        ("algorithms", "Mechanisms", "; ".join(f"{r.release}: {r.mechanism}" for r in releases)),
        ("algorithms", "Sampling", "; ".join(f"{r.release}: {r.sampler}" for r in releases)),
        (
            "algorithms",
            "Correctness",
            "ε derived again by another library (check_evidence.py); audits beside the claim",
        ),
        (
            "algorithms",
            "Floating point",
            "noise is exact: integers from random bits. Sums of gradients are of float32",
        ),
        (
            "algorithms",
            "Random numbers",
            "a secret seed for each release, from the operating system, expanded by SHAKE-256",
        ),
        (
            "algorithms",
            "Utility",
            "what the model's step measured on public text, under “What its step measured”",
        ),
        (
            "algorithms",
            "Bias",
            "noise and clipping cost rare words and small groups most; what few units share is not"
            " learned, by intent",
        ),
    ]


def _deployment(words: OperatorWords) -> list[tuple[Level, str, str]]:
    return [
        (
            "deployment",
            "Trust model",
            "central: the operator holds the text and is trusted with it; who receives the model"
            " is not",
        ),
        (
            "deployment",
            "Side channels",
            "publishable places hold days, no times and no sizes; what refusals and Airflow's own"
            " stamps tell is for the operator to grant",
        ),
        ("deployment", "Data security and access control", words.access_to_private_data),
        ("deployment", "Data collection exposure", words.data_collection),
    ]


def _parameters(claim: Claim) -> str:
    if claim.epsilon is None:
        return "no total: the releases protect unlike things; each has its own"
    return f"ε = {claim.epsilon:.4g}, δ = {claim.delta:.3g}"


def _each(claims: Sequence[Claim], say: Callable[[Claim], str]) -> str:
    if len(claims) == 1:
        return say(claims[0])
    return "; ".join(f"{claim.dataset}: {say(claim)}" for claim in claims)

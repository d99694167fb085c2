"""Example reports with made-up numbers.

Operator values occur nowhere else, so that tests can search for leaks of them.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from dp_core.audit.canaries import Canary
from dp_core.audit.exposure import ALONE, EMBEDDED, ExposureRow, rows_from_ranks
from dp_core.audit.extraction import (
    DISCOVERABLE,
    FROM_CANARIES,
    FROM_ROWS,
    GREEDY,
    SAMPLING,
    TARGETED,
    TOP_K,
    ExtractionRow,
    compare,
    extraction_finding,
)
from dp_core.audit.membership import LowRate, MembershipRow, RarityBucket, Share
from dp_core.audit.protocol import Finding
from dp_core.config.audit_settings import ExtractionConfig
from dp_core.labels import Dp, Label, Operator
from dp_core.privacy import mechanisms
from dp_core.privacy.ledger import Entry, State
from dp_core.privacy.statement import DatasetTotal
from dp_core.training.bootstrap import MeanF1
from tasks.protocol.points import Mode
from tasks.report.model import Cost, Curve, Exposures, Fact, Membership, ModelRow, Report
from tasks.report.tables import ledger_table

VOCABULARY_SIZE, DECLARED_UNITS = 3_871, 4_000
TABLES = tomllib.loads(Path(__file__).with_name("report_examples.toml").read_text())
FACTS = {
    part: tuple(Fact(name, value, Label(label), *note) for name, value, label, *note in rows)
    for part, rows in TABLES["facts"].items()
}
OMITTED = FACTS["omissions"][0].value
Rows = tuple[ExposureRow, ...]
PATTERNS, RATES = ("HS", "HSH", "HHSHH"), (0.005, 0.02)


def canaries(per_group: int, rates: tuple[float, ...], seed: int) -> list[Canary]:
    coins = np.random.default_rng(seed)
    return [
        Canary("", pattern, rate, tuple(coins.integers(5, VOCABULARY_SIZE, len(pattern)).tolist()))
        for pattern in PATTERNS
        for rate in rates
        for _ in range(per_group)
    ]


def cost(epsilon: float, delta: float) -> Cost:
    return Cost(DatasetTotal(("synthetic-notes",), mechanisms.PrivacyUnit.PATIENT, epsilon, delta))


def exposure_rows(memory: Mapping[float, float], seed: int) -> Rows:
    """Return exposures of a model; `memory` maps a rate to the factor on ranks of its secrets."""
    return _exposure_rows(tuple(memory.items()), seed)


@cache
def _exposure_rows(factor_of_rate: tuple[tuple[float, float], ...], seed: int) -> Rows:
    memory = dict(factor_of_rate)
    coins = np.random.default_rng(seed)
    planted, references = canaries(4, RATES, seed), canaries(40, (0.0,), seed + 1)

    def ranks(sequences: list[Canary], contexts: int) -> np.ndarray:
        uniform = coins.uniform(1, VOCABULARY_SIZE, (len(sequences), 1))
        factors = np.array([[memory.get(c.canary_rate, 1.0)] for c in sequences])
        spread = coins.uniform(0.8, 1.25, (len(sequences), contexts))
        return np.clip(uniform * factors * spread, 1, VOCABULARY_SIZE)

    return tuple(
        row
        for context, contexts in ((ALONE, 1), (EMBEDDED, 8))
        for row in rows_from_ranks(
            planted,
            ranks(planted, contexts),
            references,
            ranks(references, contexts),
            context=context,
            candidates=VOCABULARY_SIZE,
            declared_units=DECLARED_UNITS,
        )
    )


def membership(leakage: float, ceiling: float | None) -> tuple[Membership]:
    """Return attacks with this leakage, and this maximum under the guarantee."""
    rows = []
    for number, (level, attack) in enumerate(
        (level, attack) for level in ("sample", "patient") for attack in ("loss", "gradients")
    ):
        pl = leakage * (1 + number / 7)
        share = Share(pl, pl - 0.0413, pl + 0.0417)
        area = Share(0.5 + pl / 2, 0.5 + pl / 3, 0.5 + pl)
        low = tuple(
            LowRate(r, Share(r + pl / 5, 0.0, pl), Share(r, 0.0, 2 * r)) for r in (0.001, 0.01)
        )
        ceilings = None if ceiling is None else (ceiling / 90, ceiling / 9)
        row = MembershipRow(level, attack, 397, 283, share, area, low, ceiling, ceiling, ceilings)
        rows.append(replace(row, above=ceiling is not None and share.low > ceiling))
    return (Membership(tuple(rows)),)


def extractions(label: Label, rows: int, secrets: int) -> tuple[Finding, ...]:
    """Return extractions of `rows` of 317 rows and `secrets` of 36, with a control of 211."""
    config = ExtractionConfig(extraction_rows=317)

    def extracted(decoding: str, hits: int, tried: int, control: int) -> ExtractionRow:
        return compare(decoding, "all", np.arange(tried) < hits, np.arange(211) < control)

    secret = tuple(extracted(decoding, secrets, 36, 3) for decoding in (TOP_K, GREEDY, SAMPLING))
    row = tuple(
        replace(
            extracted(decoding, rows, 317, 101), ceiling=None if label is Label.OPERATOR else 0.673
        )
        for decoding in (GREEDY, SAMPLING)
    )
    return (
        extraction_finding(TARGETED, secret, config, FROM_CANARIES, True, label),
        extraction_finding(DISCOVERABLE, row, config, FROM_ROWS, True, Label.OPERATOR),
    )


def _curves() -> tuple[Curve, ...]:
    updates = tuple(range(10, 321, 10))
    curves = []
    for name, label, top in (
        ("Public only", Label.PUBLIC, 0.31), ("DP", Label.DP, 0.38),
        ("Non-private", Label.OPERATOR, 0.47),
    ):  # fmt: skip
        accuracy = tuple(top * (1 - math.exp(-t / 90)) for t in updates)
        loss = tuple(8.2 - 9 * a for a in accuracy)
        epsilon = tuple(0.35 * math.sqrt(t) for t in updates) if name == "DP" else ()
        curves.append(Curve(name, "mlm_public", label, updates, accuracy, epsilon))
        loss_label = Label.PUBLIC if label is Label.PUBLIC else Label.OPERATOR
        curves.append(Curve(name, "loss", loss_label, updates, loss, epsilon))
    return tuple(curves)


def _model(kind: Mode, name: str, training: float, of_all: Cost, **scores: object) -> ModelRow:
    f1, *by_type = (Operator(score) for score in scores.pop("f1"))
    return ModelRow(
        kind=kind, name=name, epsilon_vocabulary=1.0, epsilon_training=training, cost=of_all,
        pretrained=of_all, f1=f1,
        f1_by_type=dict(zip(("problem", "test", "treatment"), by_type, strict=True)), **scores,
    )  # fmt: skip


def _models(seed: int) -> tuple[ModelRow, ...]:
    learned = exposure_rows({0.005: 0.02, 0.02: 0.0008}, seed + 20)
    return (
        _model(
            "public", "Public only", 0.0, cost(1.0, 1e-7), f1=(0.6117, 0.5953, 0.6473, 0.5987),
            mlm_public=Dp(0.3141), mlm_private=Operator(0.2347),
            exposures=(Exposures(Label.DP, exposure_rows({}, seed)),),
            memberships=membership(0.2137, 0.5), extractions=extractions(Label.DP, 157, 1),
        ),
        _model(
            "dp", "DP", 6.27, cost(6.61, 1.1e-6), f1=(0.6827, 0.6653, 0.7193, 0.6637),
            mlm_public=Dp(0.3321), mlm_private=Operator(0.3767),
            exposures=(Exposures(Label.DP, exposure_rows({0.02: 0.8}, seed + 10)),),
            memberships=membership(0.2873, 0.97), extractions=extractions(Label.DP, 160, 2),
        ),
        _model(
            "nonprivate", "Non-private", math.inf, cost(math.inf, 0.0),
            f1=(0.7417, 0.7243, 0.7783, 0.7187), mlm_public=Operator(0.3389),
            mlm_private=Operator(0.4783), exposures=(Exposures(Label.OPERATOR, learned),),
            memberships=membership(0.4219, None), extractions=extractions(Label.OPERATOR, 291, 31),
        ),
    )  # fmt: skip


def by_epoch(seed: int = 7) -> tuple[ModelRow, ...]:
    """Return the models after 2, 4 and 6 epochs of a DP and a non-private training."""
    _, dp, nonprivate = _models(seed)
    trainings = (
        (dp, Label.DP, (0.6413, 0.6631, 0.6827), (1.0, 0.9, 0.8)),
        (nonprivate, Label.OPERATOR, (0.7019, 0.7211, 0.7417), (0.1, 0.01, 0.0008)),
    )
    return tuple(
        replace(
            row,
            epochs=epochs,
            f1=Operator(score),
            exposures=(Exposures(label, exposure_rows({0.02: m}, seed)),),
        )
        for row, label, scores, memory in trainings
        for epochs, score, m in zip((2.0, 4.0, 6.0), scores, memory, strict=True)
    )


def entries(*more: mechanisms.MechanismEvent) -> list[Entry]:
    """Return entries of a word histogram, a training, and of more mechanisms."""
    histogram = mechanisms.ThresholdedHistogram(128, 80.0, 600)
    training = mechanisms.PoissonGaussian.single(0.064, 1.0, 313)
    return [
        Entry(
            "synthetic-notes", mechanisms.PrivacyUnit.PATIENT, event, delta, "a",
            id=event.kind, state=State.SETTLED, seed_hash="c2ffe90112bd7a",
        )
        for event, delta in ((histogram, 1e-7), (training, 1e-6), *((e, 1e-6) for e in more))
    ]  # fmt: skip


LEDGER = ledger_table(entries(), "synthetic-notes", mechanisms.PrivacyUnit.PATIENT)
_STATEMENT = SimpleNamespace(**TABLES["statement"])
_COMMON = {
    "shown_run": "5ed1c0de5ed1c0de", "known_seed": False, "private_dataset": "synthetic-notes",
    "public_dataset": "made-up public text", "entities_dataset": "made-up entities",
    "unit": mechanisms.PrivacyUnit.PATIENT,
    "model_size": "BERT, 2 layers × 128", "ledger": LEDGER, "settings": TABLES["settings"],
    "budget": TABLES["budget"], "versions": TABLES["versions"],
}  # fmt: skip


def job_report(*, made_up: bool = True, seed: int = 7, **fields: Any) -> Report:
    """Return a report with other values of some fields."""
    report = Report(
        title="dp_bert",
        run_key="manual__2026-11-21T08:00:00+00:00",
        created="2026-11-21T08:41:12+00:00",
        made_up=made_up,
        **_COMMON,
        statement=_STATEMENT,
        models=_models(seed),
        by_epoch=by_epoch(seed),
        labels=tuple(
            Fact(kind, 1000 * row + 913 * column, Label.OPERATOR, part)
            for column, part in enumerate(("train part", "test part"), start=1)
            for row, kind in enumerate(("problem", "test", "treatment"), start=1)
        ),
        occurrences={f"{p} at {rate:g}": Operator(4065 * rate) for p in PATTERNS for rate in RATES},
        curves=_curves(),
        **FACTS,
        notes=("Both corpora and all entities were written by the project's own generator.",),
    )
    return replace(report, **fields)


def with_models(report: Report, **fields: Any) -> Report:
    """Return the report with other values of some fields of each model."""
    return replace(report, models=tuple(replace(model, **fields) for model in report.models))


def attacked_by_epoch(report: Report) -> Report:
    """Return the report with attacks after each of three epochs, except on the public model."""
    rarity = tuple(RarityBucket(3.0 * n - 40, 12, 9, 0.25 - 0.05 * n) for n in range(9))
    models = []
    for model in report.models:
        (attacks,) = model.memberships
        after = []
        for epoch in (3.0,) if model.kind == "public" else (1.0, 2.0, 3.0):
            leaked = [Share(*(e * epoch / 3 for e in astuple(r.leakage))) for r in attacks.rows]
            rows = tuple(replace(r, leakage=s) for r, s in zip(attacks.rows, leaked, strict=True))
            losses = {"members": 3.4 - epoch / 4, "others": 3.4 - epoch / 5}
            when = math.inf if model.kind == "public" else epoch
            after.append(Membership(rows, losses, when, rarity))
        ends = Operator(model.f1.value - 0.0317), Operator(model.f1.value + 0.0319)
        models.append(replace(model, memberships=tuple(after), interval=ends))
    return replace(report, models=tuple(models))


def _point(number: int, sigma: float, batch: int, epochs: float) -> ModelRow:
    epsilon = 1.3 * math.sqrt(batch * epochs / 1000) / sigma**1.4 + 0.4
    f1 = 0.57 + 0.02 * math.log2(epochs) + 0.012 * math.log2(batch) - 0.02 * sigma
    audited = (exposure_rows({}, number + seed) for seed in (0, 1))
    total = cost(epsilon + 0.7, 1.1e-6)
    return ModelRow(
        name=f"σ={sigma:g} · B={batch} · epochs={epochs:g}",
        noise_multiplier=sigma, batch_size=batch, epochs=epochs,
        epsilon_vocabulary=0.7, epsilon_training=epsilon, cost=total, pretrained=total,
        f1=Operator(f1), mlm_public=Dp(f1 / 2), mlm_private=Operator(f1 / 2 + 0.0371),
        updates=round(epochs * DECLARED_UNITS / batch),
        spread=MeanF1(f1, 4, 2, 2, 0.0123, 0.0234, (f1 - 0.03, f1 + 0.03)),
        exposures=tuple(Exposures(Label.DP, rows) for rows in audited),
    )  # fmt: skip


def sweep_report(*, made_up: bool = True, **fields: Any) -> Report:
    grid = itertools.product((0.6, 1.0, 2.0), (128, 256), (5.0, 10.0, 20.0))
    report = Report(
        title="dp_sweep",
        run_key="scheduled__2026-11-21T02:00:00+00:00",
        created="2026-11-21T04:12:00+00:00",
        made_up=made_up,
        **_COMMON,
        statement=SimpleNamespace(
            paragraphs=["Releasing all 18 models together costs ε = 21.4."], data=_STATEMENT.data
        ),
        is_sweep=True,
        models=tuple(_point(number, *settings) for number, settings in enumerate(grid)),
        notes=(
            "No point was selected by F1: the selection would not be covered by the guarantee.",
        ),
    )
    return replace(report, **fields)


def causal_sweep_report(*, made_up: bool = True) -> Report:
    """Return a sweep over causal models, with three seeds per point and two baselines."""
    report = sweep_report(made_up=made_up)
    points = []
    for number, point in enumerate(report.models):
        private = 431.7 - 7 * number
        spread = MeanF1(private, 3, 3, 1, 13.9, None, (private - 34.6, private + 34.6))
        fields = {"spread": spread, "perplexity_private": Operator(private)}
        points.append(_causal(point, **fields, perplexity_public=Dp(317.5 + number)))
    of_baselines = {"noise_multiplier": 0.0, "batch_size": 0, "spread": None}
    for name, baseline, private in (
        ("public training", "public-training", 617.3),
        ("public text only", "public", 533.9),
    ):
        fields = {"name": name, "baseline": baseline, "perplexity_private": Operator(private)}
        points.append(_causal(points[0], **fields, **of_baselines, perplexity_public=Dp(301.5)))
    return replace(report, models=tuple(points))


def _causal(point: ModelRow, **fields: Any) -> ModelRow:
    nothing = {"f1": None, "mlm_public": None, "mlm_private": None}
    return replace(point, is_causal=True, **nothing, **fields)

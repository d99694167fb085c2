import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

from sqlalchemy import select

from dp_core.config.release import ReleaseRecord
from dp_core.labels import Labelled
from dp_core.privacy.ledger import Budget, Entry, Ledger, State
from dp_core.privacy.ledger.database import Database
from dp_core.privacy.mechanisms import MechanismEvent, PoissonGaussian, PrivacyUnit
from dp_core.privacy.seed_store import SeedStore
from tasks.context import StepContext
from tasks.protocol.specs import RunContext
from tasks.releases.charge import Charge, charge
from tasks.releases.provenance import PrivateUnits
from tasks.runtime.deployment import Deployment
from tasks.storage.store import Store

UNIT = PrivacyUnit.PATIENT
NOTES = PrivateUnits("notes", UNIT, 100, 1, patients=True, origin="token_store")


def record(
    name: str, event: MechanismEvent, dataset: str = "notes", *, epsilon: float = 1.0, **more: Any
) -> ReleaseRecord:
    """Return a release record as step results contain it; without a guarantee, ε is infinite."""
    stated = (math.inf, 0.0) if event.is_unaccounted else (epsilon, 1e-6)
    fields = dict(zip(("epsilon", "delta"), stated, strict=True)) | {"budget": dataset} | more
    return ReleaseRecord(
        ledger_id=name, dataset=dataset, unit=event.unit.value, event=event.to_json(),
        epsilon_rdp=None, **fields,
    )  # fmt: skip


def hold(deployment: Deployment, records: Iterable[ReleaseRecord]) -> None:
    ledger = Ledger.open(deployment.ledger)
    for release in records:
        if release.dataset not in ledger.datasets():
            ledger.register_made_up(release.dataset)
        with Database(deployment.ledger).transaction() as db:
            if db.scalars(select(Entry).where(Entry.id == release.ledger_id)).one_or_none():
                continue
            entry = Entry(
                id=release.ledger_id, dataset=release.dataset, unit=PrivacyUnit(release.unit),
                event=MechanismEvent.from_json(release.event), delta=release.delta,
                spec_hash=release.ledger_id, state=State.SETTLED, released_hash=release.released,
            )  # fmt: skip
            entry.budget_id = Budget.of_dataset(db, release.dataset).id
            db.add(entry)


def bench_of(
    deployment: Deployment, spec_hash: str = "a" * 64, made_up: bool = False, run: str = "run"
) -> StepContext:
    releases: list[ReleaseRecord] = []
    measured: dict[str, Labelled] = {}
    context = SimpleNamespace(
        deployment=deployment,
        store=Store(deployment.store, deployment.cache),
        spec_hash=spec_hash,
        made_up=made_up,
        run=RunContext(run_key=run, run_name=run, task="pretrain"),
        seeds=SeedStore(deployment.seeds),
        releases=releases,
        descends_from=releases.append,
        measure=lambda name, value, step=0: measured.update({name: value}),
        measured=measured,
        durable=deployment.home / "work" / "budget",
        content_key=lambda: b"key",
    )
    return cast(StepContext, context)


def charged(context: StepContext, content: bytes = b"m", **more: Any) -> Charge:
    event = PoissonGaussian.single(0.01, 2.0, 100, unit=UNIT)
    fields = {"dataset": "notes", "unit": UNIT, "event": event, "delta": 1e-6}
    fields["declared_units"] = 100
    planned = Entry(spec_hash=context.spec_hash, **(fields | more))
    return charge(context, NOTES, planned, content=content)

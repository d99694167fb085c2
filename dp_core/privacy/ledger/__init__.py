"""The privacy ledger: every release of private data is an entry, reserved before the data is read.

    ledger = Ledger.open("sqlite:////srv/confide/ledger.db")
    ledger.register_dataset("notes", PrivacyUnit.PATIENT, budget_epsilon=8.0, budget_delta=1e-5)
    entry = ledger.reserve(Entry("notes", unit, event, delta, spec_hash))
    ...                                      # only now may the data be read
    seed = ledger.seed(entry, seed_store, manifest)
    ...                                      # sample, clip, add noise
    ledger.settle(entry.id, seed.derive("released", digest))
    ...                                      # only now may the output be published

docs/adr/0005-ledger-composition.md explains the composition rules and why they are sound.
"""

from dp_core.privacy.ledger.database import LedgerDamaged, LedgerUnavailable
from dp_core.privacy.ledger.dataset_sources import PublicSource
from dp_core.privacy.ledger.ledger import Ledger
from dp_core.privacy.ledger.models import Budget, Entry, State
from dp_core.privacy.ledger.privacy_filter import AdmissionDecision, PrivacyCharge, Remaining, Way

"""How a trained model is audited, beside its canaries."""

from __future__ import annotations

from dp_core.config.fields import AUDIT_AND_RUN, Config, setting


class AuditCanariesConfig(Config):
    """Whole-unit canaries in a job's own private training, each in or out by a secret coin."""

    audit_canaries: int = setting(
        0,
        AUDIT_AND_RUN,
        "Audit of ε: canaries",
        "Units of random tokens beside the private ones, each in DP pre-training or left out by a "
        "secret coin: from the model the audit guesses which, and what it guesses bounds ε from "
        "below. Each counts as a declared unit and costs what one costs; a tenth of declared_units "
        "is plenty. 0: no audit. A sweep has none.",
        ge=0,
        le=100_000,
    )


class MembershipConfig(Config):
    """Membership attacks: on how many units, and under how many masks."""

    membership_units: int = setting(
        0,
        AUDIT_AND_RUN,
        "Membership attacks: units",
        "At most this many units that trained, and as many held out, are attacked; what is found "
        "is the operator's. 0: no membership attacks. A sweep has none.",
        ge=0,
        le=1_000_000,
    )
    membership_masks: int = setting(
        4,
        AUDIT_AND_RUN,
        "Membership attacks: masks",
        "Fresh masks over which a masked model's losses are averaged; more of them tell members "
        "apart better, and cost as many times the computing.",
        ge=1,
        le=256,
    )

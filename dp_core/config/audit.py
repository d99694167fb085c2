"""How a trained model is audited, beside its canaries."""

from __future__ import annotations

from dp_core.config.fields import AUDIT_AND_RUN, Config, setting


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

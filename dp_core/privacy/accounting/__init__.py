"""From events to ε: PLD is the claim, Rényi beside it, no amplification for comparison."""

from dp_core.privacy.accounting.composition import GroupGuarantee, compose, group_privacy
from dp_core.privacy.accounting.gaussian import gaussian_delta, gaussian_epsilon
from dp_core.privacy.accounting.pld import (
    delta_pld,
    epsilon_pld,
    is_unaccounted,
    without_pld,
)
from dp_core.privacy.accounting.rdp import epsilon_paper_conversion, epsilon_rdp, rdp_curve
from dp_core.privacy.accounting.relations import refuse_large_delta, stated_delta, under
from dp_core.privacy.accounting.unamplified import (
    epsilon_shuffled_replace_one,
    epsilon_unamplified,
)

__all__ = [
    "GroupGuarantee",
    "compose",
    "delta_pld",
    "epsilon_paper_conversion",
    "epsilon_pld",
    "epsilon_rdp",
    "epsilon_shuffled_replace_one",
    "epsilon_unamplified",
    "gaussian_delta",
    "gaussian_epsilon",
    "group_privacy",
    "is_unaccounted",
    "rdp_curve",
    "refuse_large_delta",
    "stated_delta",
    "under",
    "without_pld",
]

"""From events to ε: PLD is the claim, Rényi beside it, no amplification for comparison."""

from dp_core.privacy.accounting.composition import (
    GroupGuarantee,
    compose,
    epsilon_shuffled_replace_one,
    epsilon_unamplified,
    group_privacy,
    refuse_large_delta,
    stated_delta,
    under,
)
from dp_core.privacy.accounting.pld import delta_pld, epsilon_pld, is_unaccounted, without_pld
from dp_core.privacy.accounting.profiles import gaussian_delta, gaussian_epsilon
from dp_core.privacy.accounting.rdp import epsilon_paper_conversion, epsilon_rdp, rdp_curve

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

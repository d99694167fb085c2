"""Converts mechanisms to ε: by PLD for claims, by Rényi DP and without amplification to compare."""

from dp_core.privacy.accounting.pld import delta_pld, epsilon_pld
from dp_core.privacy.accounting.profiles import (
    epsilon_unamplified,
    gaussian_delta,
    gaussian_epsilon,
)
from dp_core.privacy.accounting.rdp import epsilon_paper_conversion, epsilon_rdp
from dp_core.privacy.accounting.tradeoff import (
    GroupGuarantee,
    PrivacyProfile,
    group_privacy,
    tpr_ceiling,
)

__all__ = [
    "GroupGuarantee",
    "PrivacyProfile",
    "delta_pld",
    "epsilon_paper_conversion",
    "epsilon_pld",
    "epsilon_rdp",
    "epsilon_unamplified",
    "gaussian_delta",
    "gaussian_epsilon",
    "group_privacy",
    "tpr_ceiling",
]

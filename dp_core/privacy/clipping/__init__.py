"""Per-unit gradient clipping at about the cost of an ordinary step (Bu et al. 2023)."""

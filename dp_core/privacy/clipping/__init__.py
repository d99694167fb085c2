"""Per-unit gradient clipping at the price of an ordinary step: book-keeping (Bu et al. 2023)."""

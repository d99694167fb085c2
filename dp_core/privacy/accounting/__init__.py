"""Converts mechanisms to ε: by PLD for claims, by Rényi DP and without amplification to compare."""

"""The share of the non-private gain that private training keeps: cells, runs, shares, figure."""

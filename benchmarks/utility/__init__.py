"""How much of the non-private gain a private training keeps: cells, runs, shares, figure."""

"""How much of what private text could give a private training keeps: cells, runs, shares, figure."""

"""The evidence pack: what a stranger needs to check a model's privacy claim without us."""

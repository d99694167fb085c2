"""The deployment of a step, and its log."""

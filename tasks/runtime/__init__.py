"""The deployment that a step runs in, and its log."""

"""Algorithms that no step uses yet."""

"""Synthetic text: clinical notes, sentences with entities, public articles."""

"""Differentially private vocabularies."""

"""Differentially private vocabularies and phrases."""

"""Layers of neural networks, shared by all models."""

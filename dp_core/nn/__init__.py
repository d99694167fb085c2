"""Layers of neural networks, apart from models."""

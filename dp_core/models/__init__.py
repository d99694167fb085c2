"""Encoders and causal models, and their Hugging Face folders."""

"""Phrases that many units share, released with noise, and text generated from them."""

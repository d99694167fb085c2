"""Phrases that many units share: released with noise, and text written from them."""

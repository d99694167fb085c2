"""Loaded before any test: `dp_core` chooses TensorFlow's products, so it comes first."""

import dp_core  # noqa: F401

"""Loaded before any test: `dp_core` chooses TensorFlow's products, so it comes first."""

import importlib.util

import dp_core  # noqa: F401

if importlib.util.find_spec("hypothesis"):  # not everywhere that tests run
    from hypothesis import settings

    # How long an example takes is this machine's affair: a busy one fails no test.
    settings.register_profile("confide", deadline=None)
    settings.load_profile("confide")

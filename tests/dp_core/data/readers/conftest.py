"""Parametrises the inherited tests with the contract cases of each reader."""

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "bad_item" in metafunc.fixturenames:
        cases = metafunc.cls.BAD_ITEMS
        metafunc.parametrize("bad_item", cases, ids=range(len(cases)))

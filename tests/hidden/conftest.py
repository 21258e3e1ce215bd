"""Tiny models run on one thread; most tests have one of them, and prompts for it."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    pass


@pytest.fixture
def model():
    import tiny_models

    return tiny_models.make()


@pytest.fixture
def ids():
    import tiny_models

    return tiny_models.prompts()[0]


@pytest.fixture
def mask():
    import tiny_models

    return tiny_models.prompts()[1]

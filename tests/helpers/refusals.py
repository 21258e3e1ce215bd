"""Errors that are wanted."""

import re

import pytest


def refused(message, call, *args, error=ValueError, **named):
    """The text of the error that the call ends with; `message` is found in it."""
    __tracebackhide__ = True
    try:
        call(*args, **named)
    except error as caught:
        said = str(caught)
    else:
        pytest.fail(f"nothing says {message!r}")
    assert re.search(message, said), f"{message!r} is not in: {said}"
    return said

"""when_imported(): calls once after another package imports its own module, never before."""

import importlib
import sys

import pytest
from refusals import refused

from bipace_kernels.support.when_imported import when_imported


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `waited_for` with a module `part`, and what was called when."""
    folder = tmp_path / "waited_for"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "part.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("waited_for", "waited_for.part"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield []
    for name in ("waited_for", "waited_for.part"):
        sys.modules.pop(name, None)


def test_a_call_comes_after_the_module_s_own_code_and_once(package):
    """At once where the module is there."""
    when_imported("waited_for.part", lambda: package.append(sys.modules["waited_for.part"].value))
    when_imported("waited_for.part", lambda: package.append("second"))
    importlib.import_module("waited_for")
    assert package == []
    module = importlib.import_module("waited_for.part")
    importlib.reload(module)
    assert package == [1, "second"]
    when_imported("waited_for.part", lambda: package.append("at once"))
    assert package == [1, "second", "at once"]


def test_a_module_that_fails_calls_nothing_and_one_that_is_missing_is_missing(package, tmp_path):
    (tmp_path / "waited_for" / "part.py").write_text("raise OSError('own error')\n")
    when_imported("waited_for.part", lambda: package.append("called"))
    refused("own error", importlib.import_module, "waited_for.part", error=OSError)
    when_imported("waited_for.none", lambda: package.append("called"))
    refused(r"waited_for\.none", importlib.import_module, "waited_for.none", error=ModuleNotFoundError)
    assert package == []

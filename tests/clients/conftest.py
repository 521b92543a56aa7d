"""What several files of this folder's tests share."""

import importlib
import sys

import pytest

from shardwise.compat import activation


@pytest.fixture
def served(monkeypatch):
    """`deepspeed` in pytest's own process, which other tests find without it."""
    monkeypatch.syspath_prepend(activation.FOLDER)
    yield importlib.import_module("deepspeed")
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]

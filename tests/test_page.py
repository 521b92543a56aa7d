"""docs/models.md lists what the tests hold."""

import importlib

from support import page
from support.awkward import CASES
from support.conduct import CONDUCTS


def test_the_page_is_current():
    text = page.PAGE.read_text()
    assert text == page.current(text), "run: make models-page"
    assert [match[2] for match in page.BLOCK.finditer(text)] == list(page.TABLES)


def test_every_row_is_held_by_a_test():
    page.conduct()
    for one in CONDUCTS:
        module, _, name = one.test.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))
    assert len(CASES) > 20
    assert len(CONDUCTS) > 10

"""docs/models.md lists what the tests hold, docs/parallelism.md what plans say, docs/errors.md what src raises."""

import importlib

import pytest

from support import errors_page, page
from support.awkward import CASES
from support.conduct import CONDUCTS


@pytest.mark.parametrize("path", page.PAGES, ids=lambda path: path.name)
def test_the_page_is_current(path):
    text = path.read_text()
    assert text == page.current(text), "run: make models-page"
    assert [match[2] for match in page.BLOCK.finditer(text)] == page.PAGES[path]


def test_every_row_is_held_by_a_test():
    page.conduct()
    for one in CONDUCTS:
        module, _, name = one.test.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))
    assert len(CASES) > 20
    assert len(CONDUCTS) > 10


def test_the_page_of_errors_is_current():
    text = errors_page.PAGE.read_text()
    assert text == errors_page.current(text), "run: make errors-page"


def test_every_kind_of_error_has_a_section():
    """What is raised with a message of ours is listed, but for classes that never leave the package."""
    inside = {"BadParameter", "AttributeError", "AssertionError", "Untraceable", "RowFailed", "StoreSilentError"}
    raised = {kind for path in errors_page.SRC.rglob("*.py") for kind, _ in errors_page.texts(path)}
    assert {kind for kind in raised if errors_page.section_of(kind) is None} <= inside
    assert len(errors_page.messages()) > 250

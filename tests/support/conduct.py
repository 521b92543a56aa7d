"""Operations on a model under an engine, as rows of docs/models.md: each names the test that holds it."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Conduct:
    """`works`; `refused` with an error that says what to do; or a `limit`: it fails, and `how` gives a workaround."""

    what: str
    outcome: str
    how: str
    test: str


CONDUCTS: list[Conduct] = []


def conduct(what: str, outcome: str, how: str) -> Callable[[Any], Any]:
    """Register the test below it."""
    assert outcome in ("works", "refused", "limit")

    def register(test: Any) -> Any:
        CONDUCTS.append(Conduct(what, outcome, how, f"{test.__module__}.{test.__name__}"))
        return test

    return register

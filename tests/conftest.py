"""pytest's side of the test support: workers end with the session."""

import pytest

from support import close_pools


def pytest_unconfigure(config: pytest.Config) -> None:
    close_pools()

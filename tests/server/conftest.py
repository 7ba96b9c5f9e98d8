"""One server over the tiny model for most tests, with its engine in this process so that it can be looked into."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import Server, tiny_server

pytest.importorskip("fastapi")


@pytest.fixture(scope="session")
def _tiny() -> Iterator[Server]:
    server = tiny_server().wait_ready()
    yield server
    server.close()


@pytest.fixture
def tiny(_tiny: Server) -> Iterator[Server]:
    yield _tiny
    _tiny.assert_free()

import pytest

from tests.server.harness import Server, running


@pytest.fixture(scope="session")
def _shared_server():
    with running() as server:
        yield server


@pytest.fixture
def server(_shared_server) -> Server:
    """One server for most tests; each gets it idle, and must leave it idle."""
    _shared_server.reset()
    yield _shared_server
    _shared_server.reset()

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.harness import SHOW, Server, running


@pytest.fixture(scope="session")
def _shared_server():
    with running() as server:
        yield server


def _idle(server: Server):
    server.reset()
    yield server
    server.reset()


@pytest.fixture
def server(_shared_server) -> Server:
    """One server for most tests; each gets it idle, and must leave it idle."""
    yield from _idle(_shared_server)


@pytest.fixture(scope="session")
def _show():
    with running(template=SHOW, engine=FakeEngine(max_model_len=4096)) as server:
        yield server


@pytest.fixture
def show(_show) -> Server:
    """The same with a template that prints the conversation; see ``harness.prompt_of``."""
    yield from _idle(_show)

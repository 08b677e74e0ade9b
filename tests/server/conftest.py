import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.harness import SHOW, Server, running


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


@pytest.fixture(scope="session")
def _show():
    with running(template=SHOW, engine=FakeEngine(max_model_len=4096)) as server:
        yield server


@pytest.fixture
def show(_show) -> Server:
    """The same with a template that prints the conversation; see ``harness.prompt_of``."""
    _show.reset()
    yield _show
    _show.reset()

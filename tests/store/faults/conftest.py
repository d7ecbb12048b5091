"""Fixtures of the fault tests: a folder in memory, and a server that forks children cheaply."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

# Children of the fork server import this folder's modules by name, so the tests do as well.
sys.path.insert(0, str(Path(__file__).parent))

from faultkit import Zygote


@pytest.fixture
def ram():
    """A new folder where fsync costs nothing, if the machine has one."""
    shared = Path("/dev/shm")
    place = shared if os.access(shared, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="gradkeep-faults-", dir=place))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def zygote():
    """A process that has imported everything and forks a child for each job."""
    with Zygote() as running:
        yield running

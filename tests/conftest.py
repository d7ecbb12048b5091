"""Hypothesis profiles, helpers that several rooms share, and a filesystem that can really be full.

`local` explores anew in every run, `ci` draws the same examples each time.

HYPOTHESIS_PROFILE chooses one by name; otherwise the variable CI does.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# Helpers that tests of several rooms share lie beside this file and are imported by name.
sys.path.insert(0, str(Path(__file__).parent))

# No deadline: the first example pays for imports and cold caches, and machines differ.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "local")
)


@pytest.fixture(autouse=True)
def _no_read_cache(monkeypatch):
    """Tests leave nothing in the user's cache, and see every request; those of the cache name one."""
    monkeypatch.setenv("GRADKEEP_CACHE", "off")


@pytest.fixture(scope="session")
def s3():
    """The address of an S3 server with a bucket named `bucket`."""
    from s3_server import serving

    with serving() as address:
        yield address


@pytest.fixture
def line(s3):
    """A line to that server which can be made bad."""
    from s3_server import carrying

    with carrying(s3) as server:
        yield server


@pytest.fixture
def small_disk(tmp_path):
    """A function that mounts a small filesystem, or changes how it is mounted."""
    place = tmp_path / "mounted"
    place.mkdir()

    def mount(options):
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount a filesystem here: {done.stderr.strip()}")
        return place

    yield mount
    if place.is_mount():
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def inline(tmp_path, monkeypatch, capsys):
    """Run `gradkeep ARGUMENTS` in this process, for tests of many command lines."""
    from gradkeep.cli._app import run

    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            run([str(item) for item in arguments])
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, ended.value.code, out, err)

    return call

"""A store in a place that gradkeep does not know, as somebody outside of it would add one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from store_suite.store_tests import FullStoreTests

import gradkeep as gk
from gradkeep.errors import DamagedError, NotAStoreError, StoreError
from gradkeep.store import Bucket, LocalDisk, Memory, backend_for, gc, register_backend, verify

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from own_backend import SqliteFile  # noqa: E402
from raises import raises  # noqa: E402

KEY = gk.store.CaptureKey(checkpoint="final", split="train")
SCHEMA = gk.store.Schema((gk.store.Array("loss"),), rows_per_segment=2)


@pytest.fixture
def url(tmp_path):
    register_backend("sqlite", SqliteFile)
    return f"sqlite://{tmp_path}/store.db"


def fill(store):
    with store.write(KEY, SCHEMA) as writer:
        writer.append([3, 1, 2], {"loss": [0.5, 2.0, 4.0]})


class TestSqliteFile(FullStoreTests):
    @pytest.fixture
    def backend(self, url):
        return SqliteFile(url)


def test_a_url_of_a_registered_scheme_is_opened_like_a_path(url):
    store = gk.open(url)
    fill(store)
    second_store = gk.open(url, create=False)
    assert isinstance(second_store.backend, SqliteFile)
    assert second_store.location == url
    assert second_store.read(KEY).read([2])["loss"].tolist() == [4.0]
    assert second_store.sql("select sum(loss) from samples").rows() == [(6.5,)]
    assert second_store.info().blocks[0].rows == 3


def test_a_capture_goes_to_a_url(url):
    import torch

    model = torch.nn.Linear(3, 2)
    batch = (torch.ones(4, 3), torch.tensor([0, 1, 1, 0]))
    for split in ("train", "test"):
        gk.capture(
            url,
            model,
            [batch],
            task=gk.Classification(),
            checkpoints="final",
            split=split,
            progress=False,
        )
    assert gk.attribute(gk.open(url), method="dot").shape == (4, 4)


def test_registering_the_same_again_is_free(url):
    register_backend("sqlite", SqliteFile)
    assert isinstance(backend_for(url), SqliteFile)


@pytest.mark.parametrize("scheme", ["sqlite", "s3", "memory", "file"])
def test_a_scheme_that_is_taken_is_refused_and_stays(scheme, url):
    with raises(StoreError, "store.scheme_taken") as caught:
        register_backend(scheme, lambda url: Memory())
    assert "another scheme" in caught.value.fix
    assert isinstance(backend_for(url), SqliteFile)


@pytest.mark.parametrize("scheme", ["", "S3", "a b", "1x", "mem://", "mem:", None])
def test_what_cannot_be_a_scheme_is_refused(scheme):
    with raises(StoreError, "store.invalid_scheme"):
        register_backend(scheme, SqliteFile)


def test_a_factory_that_cannot_be_called_is_refused():
    with raises(StoreError, "store.invalid_factory"):
        register_backend("uncalled", "own_backend:SqliteFile")


def test_a_factory_that_returns_no_backend_is_named():
    register_backend("nothing", lambda url: None)
    with raises(StoreError, "store.not_a_backend") as caught:
        gk.open("nothing://x")
    assert "NoneType" in str(caught.value)


@pytest.mark.parametrize("url", ["nosuch://bucket/x", "http://x/y", "S3://bucket", "://x"])
def test_an_unknown_scheme_says_which_there_are_and_how_to_add_one(url):
    with raises(StoreError, "store.unknown_scheme") as caught:
        gk.open(url)
    assert caught.value.path == url
    assert "s3://" in str(caught.value)
    assert "register_backend" in str(caught.value)


def test_what_was_there_before_goes_through_the_same_door(tmp_path):
    assert isinstance(backend_for(tmp_path), LocalDisk)
    assert isinstance(backend_for(str(tmp_path)), LocalDisk)
    assert isinstance(backend_for("memory://x"), Bucket)
    assert backend_for(f"file://{tmp_path}/a%20b").root == f"{tmp_path}/a b"
    assert isinstance(backend_for(f"file://localhost{tmp_path}"), LocalDisk)
    own = Memory()
    assert backend_for(own) is own


@pytest.mark.parametrize(
    "url", ["file://", "file:///", "file://host/x", "file:////", "file:///%00"]
)
def test_a_file_url_that_names_no_folder_is_refused(url):
    with raises(StoreError, "store.invalid_url"):
        gk.open(url)


def test_a_file_url_follows_no_links(tmp_path):
    store = gk.open(tmp_path / "store")
    with store.write(gk.store.ScoresKey("a"), gk.store.Schema((gk.store.Array("s"),))) as writer:
        writer.append([0], {"s": [1.0]})
    (segments,) = (tmp_path / "store").rglob("seg")
    segments.rename(tmp_path / "elsewhere")
    segments.symlink_to(tmp_path / "elsewhere")
    assert not verify(f"file://{tmp_path}/store").healthy
    with pytest.raises(DamagedError):
        gc(f"file://{tmp_path}/store")
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


@pytest.fixture
def command(tmp_path):
    """`gradkeep ARGUMENTS` where the stranger's package is installed with its entry point."""
    installed = tmp_path / "site" / "own_backend-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: own-backend\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(
        "[gradkeep.backends]\nsqlite = own_backend:SqliteFile\n"
    )
    path = os.pathsep.join([str(tmp_path / "site"), str(HERE), os.environ.get("PYTHONPATH", "")])

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "gradkeep", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": path, "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )

    return run


def test_every_command_takes_the_url_of_an_installed_backend(command, url):
    store = gk.open(url)
    fill(store)
    store.drop_rows(KEY, [1])
    info = command("info", url, "--json")
    assert json.loads(info.stdout)["runs"][0]["checkpoints"][0]["captures"][0]["rows"] == 2
    total = command("sql", url, "select sum(loss) from samples", "--csv")
    assert total.stdout.splitlines()[1] == "4.5"
    assert command("verify", url).stdout.startswith("healthy")
    assert "removed" in command("gc", url).stdout
    deleted = command("delete", url, "main/final/train/main", "--yes")
    assert (deleted.returncode, deleted.stderr) == (0, "")
    assert gk.open(url, create=False).blocks() == []


def test_a_command_imports_results_to_a_url(command, url, tmp_path):
    saved = tmp_path / "trak_results"
    saved.mkdir()
    np.savez(saved / "nothing.npz")
    failed = command("import", "trak", saved, "--store", url)
    assert failed.returncode == 2
    assert "trak_results" in failed.stderr
    assert not (tmp_path / "sqlite:").exists()
    with pytest.raises(NotAStoreError):
        gk.open(url, create=False)


def test_a_command_with_an_unknown_scheme_names_the_way_to_add_one(command):
    reported = command("info", "nosuch://x")
    assert reported.returncode == 2
    assert "gradkeep.backends" in reported.stderr

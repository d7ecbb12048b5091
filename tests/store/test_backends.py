"""Every place that gradkeep brings along passes the tests that it asks of others."""

import pytest

from gradkeep.store import Bucket, LocalDisk, Memory
from gradkeep.testing import StoreTests


class TestLocalDisk(StoreTests):
    @pytest.fixture
    def backend(self, tmp_path):
        return LocalDisk(tmp_path / "store")


class TestMemory(StoreTests):
    @pytest.fixture
    def backend(self):
        return Memory()


class TestBucketInMemory(StoreTests):
    @pytest.fixture
    def backend(self):
        return Bucket("memory://")


class TestBucketInFolder(StoreTests):
    @pytest.fixture
    def backend(self, tmp_path):
        return Bucket(f"file://{tmp_path}/store")

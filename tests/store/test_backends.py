"""Every place that gradkeep brings along passes the tests that it asks of others."""

import pytest
from store_suite.store_tests import FullStoreTests

from gradkeep.store import Bucket, LocalDisk, Memory


class TestLocalDisk(FullStoreTests):
    @pytest.fixture
    def backend(self, tmp_path):
        return LocalDisk(tmp_path / "store")


class TestMemory(FullStoreTests):
    @pytest.fixture
    def backend(self):
        return Memory()


class TestBucketInMemory(FullStoreTests):
    @pytest.fixture
    def backend(self):
        return Bucket("memory://")


class TestBucketInFolder(FullStoreTests):
    @pytest.fixture
    def backend(self, tmp_path):
        return Bucket(f"file://{tmp_path}/store")

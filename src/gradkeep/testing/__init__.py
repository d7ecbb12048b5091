"""Tests that every place for a store must pass; third-party backends run them as they are.

    class TestMyPlace(StoreTests):
        @pytest.fixture
        def backend(self, tmp_path):
            return MyPlace(tmp_path)

`BackendTests` alone asks only for the contract of `gradkeep.store.Backend`; `StoreTests` also puts
whole stores on it. `gradkeep.store.register_backend` then makes the place known by a URL.
"""

from __future__ import annotations

from gradkeep.errors import MissingExtra

try:
    import hypothesis  # noqa: F401
    import pytest
except ImportError as error:
    raise MissingExtra(
        "gradkeep.testing needs pytest and hypothesis", fix="pip install pytest hypothesis"
    ) from error

# Before the import: a failing assert then shows its values, as in a test file.
for module in ("backend_tests", "examples", "state_machines", "store_tests", "whole_store_tests"):
    pytest.register_assert_rewrite(f"{__name__}._{module}")

from gradkeep.testing._backend_tests import BackendTests  # noqa: E402
from gradkeep.testing._store_tests import StoreTests  # noqa: E402

__all__ = ["BackendTests", "StoreTests"]

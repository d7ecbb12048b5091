"""The full suite for store backends: the public `StoreTests`, whole stores and state machines.

Every backend that gradkeep brings along runs it; `gradkeep.testing.StoreTests` is its public part.
"""

import pytest

# Before the imports: a failing assert then shows its values, as in a test file.
for module in ("backend_tests", "examples", "state_machines", "store_tests", "whole_store_tests"):
    pytest.register_assert_rewrite(f"{__name__}.{module}")

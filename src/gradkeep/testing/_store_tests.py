"""All tests of a place for a store in one class."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from gradkeep.testing._backend_tests import BackendTests
from gradkeep.testing._below import Below
from gradkeep.testing._block_machine import BlockMachine
from gradkeep.testing._rows_machine import RowsMachine
from gradkeep.testing._whole_store_tests import WholeStoreTests

if TYPE_CHECKING:
    from gradkeep.store import Backend


class StoreTests(BackendTests, WholeStoreTests):
    """Subclass it as `TestMyPlace` and override `backend`."""

    @pytest.fixture
    def backend(self) -> Backend:
        """A place that is empty at the start of every test."""
        raise NotImplementedError("override this fixture: it returns an empty place")

    @pytest.mark.parametrize("machine", [BlockMachine, RowsMachine], ids=["block", "rows"])
    def test_any_sequence_of_steps_does_what_a_dictionary_would(
        self, backend: Backend, machine: type[BlockMachine | RowsMachine]
    ) -> None:
        number = count()

        def start() -> RuleBasedStateMachine:
            return machine(Below(backend, f"example-{next(number)}"))

        run_state_machine_as_test(
            # Declared to take a class, documented to take whatever makes a machine.
            cast("type[RuleBasedStateMachine]", start),
            settings=settings(
                # A fraction of what the profile asks for: one example is many steps.
                max_examples=max(1, settings().max_examples // 8),
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

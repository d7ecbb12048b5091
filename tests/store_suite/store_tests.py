"""All tests of a place for a store in one class."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from gradkeep.store import Backend
from gradkeep.testing import StoreTests
from store_suite.backend_tests import BackendTests
from store_suite.state_machines import BlockStateMachine, RowsStateMachine
from store_suite.whole_store_tests import WholeStoreTests

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gradkeep.store import Durability, Entry, Readable


class SubfolderBackend(Backend):
    """Every key lies below a folder of another backend, so that each example starts empty."""

    def __init__(self, backend: Backend, folder: str) -> None:
        self.location = backend.describe(folder)
        self._backend, self._folder = backend, folder

    def put_if_absent(
        self, key: str, parts: Sequence[bytes | memoryview], *, durability: Durability
    ) -> bool:
        return self._backend.put_if_absent(self._key(key), parts, durability=durability)

    def open(self, key: str) -> Readable:
        return self._backend.open(self._key(key))

    def list(self, prefix: str) -> list[Entry]:
        return self._backend.list(self._key(prefix))

    def exists(self, key: str) -> bool:
        return self._backend.exists(self._key(key))

    def delete(self, keys: Iterable[str], *, durability: Durability) -> int:
        return self._backend.delete(map(self._key, keys), durability=durability)

    def move_aside(self, key: str) -> str:
        return self._backend.move_aside(self._key(key))

    def leftovers(self, *, older_than: float) -> Sequence[str]:
        start = f"{self._folder}/"
        actual = self._backend.leftovers(older_than=older_than)
        return [key.removeprefix(start) for key in actual if key.startswith(start)]

    def ensure_durable(self, keys: Iterable[str]) -> None:
        self._backend.ensure_durable(map(self._key, keys))

    def local_path(self, key: str) -> str | None:
        return self._backend.local_path(self._key(key))

    def _key(self, key: str) -> str:
        return f"{self._folder}/{key}" if key else self._folder


class FullStoreTests(StoreTests, BackendTests, WholeStoreTests):
    """Subclass it and override `backend`."""

    @pytest.mark.parametrize(
        "machine", [BlockStateMachine, RowsStateMachine], ids=["block", "rows"]
    )
    def test_any_sequence_of_steps_does_what_a_dictionary_would(
        self, backend: Backend, machine: type[BlockStateMachine | RowsStateMachine]
    ) -> None:
        number = count()

        def start() -> RuleBasedStateMachine:
            return machine(SubfolderBackend(backend, f"example-{next(number)}"))

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

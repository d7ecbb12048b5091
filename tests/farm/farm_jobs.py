"""Jobs for the tests, in a module that worker processes can import."""

import ctypes
import os
import signal
import time
from pathlib import Path

import numpy as np


def value(number):
    """What a row must hold: the same whoever computes it, and whenever."""
    return np.random.default_rng([7, number]).normal(size=3).astype(np.float32)


def trivial(numbers):
    return [{"value": value(n), "number": np.int64(n)} for n in numbers]


LONG = 60


def with_data(data, numbers):
    """A job that brings a data set with it."""
    assert len(data)
    return trivial(numbers)


def never_reads(connection):
    """A process that starts and goes no further."""
    time.sleep(LONG)


class Slow:
    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, numbers):
        time.sleep(self.seconds * len(numbers))
        return trivial(numbers)


class Signed(Slow):
    """Leaves the number of every process that worked on it."""

    def __init__(self, seconds, notes):
        super().__init__(seconds)
        self.notes = notes

    def __call__(self, numbers):
        (Path(self.notes) / str(os.getpid())).touch()
        return super().__call__(numbers)


class Hanging:
    """Some rows hang, on the first attempt or always."""

    def __init__(self, rows, notes=None):
        self.rows, self.notes = rows, notes

    def __call__(self, numbers):
        for n in numbers:
            if n in self.rows and (self.notes is None or first_time(self.notes, n)):
                wait_for_ever()
        return trivial(numbers)


class Stuck:
    """One row hangs in native code that never lets go of Python, the first time."""

    def __init__(self, notes):
        self.notes = notes

    def __call__(self, numbers):
        if 1 in numbers and first_time(self.notes, 1):
            ctypes.PyDLL(None).sleep(1000)
        return trivial(numbers)


class Failing:
    """Some rows raise, the first `times` times."""

    def __init__(self, rows, notes, times):
        self.rows, self.notes, self.times = rows, notes, times

    def __call__(self, numbers):
        for n in numbers:
            if n in self.rows and count(self.notes, n) <= self.times:
                raise ValueError(f"row {n} has no luck")
        return trivial(numbers)


class Dying:
    """Some rows take the whole process with them."""

    def __init__(self, rows):
        self.rows = rows

    def __call__(self, numbers):
        if set(numbers) & set(self.rows):
            os.kill(os.getpid(), signal.SIGSEGV)
        return trivial(numbers)


class Wrong:
    """Some rows return what the schema does not allow."""

    def __init__(self, answers):
        self.answers = answers

    def __call__(self, numbers):
        return [
            {**row, **self.answers.get(n, {})}
            for n, row in zip(numbers, trivial(numbers), strict=True)
        ]


class Threads:
    def __call__(self, numbers):
        count = int(os.environ["OMP_NUM_THREADS"])
        return [{"value": np.full(3, count, np.float32), "number": np.int64(n)} for n in numbers]


class Exiting:
    def __call__(self, numbers):
        if 1 in numbers:
            raise SystemExit(2)
        return trivial(numbers)


class Counted:
    """Leaves a note in every process that loads it."""

    def __init__(self, notes):
        self.notes = notes

    def __setstate__(self, state):
        self.__dict__.update(state)
        count(self.notes, "loads")

    def __call__(self, numbers):
        return trivial(numbers)


class Unloadable:
    def __reduce__(self):
        return (no_such_data, ())

    def __call__(self, numbers):
        return trivial(numbers)


def no_such_data():
    raise FileNotFoundError("the training data is not on this machine")


def wait_for_ever():
    while True:
        time.sleep(1)


def count(notes, n):
    """How often this was called for n, across processes."""
    with open(Path(notes) / str(n), "a") as file:
        file.write("x")
    return (Path(notes) / str(n)).stat().st_size


def first_time(notes, n):
    return count(notes, n) == 1


class Vanishing:
    """Some rows end the whole process with an exit code, as if all were well."""

    def __init__(self, rows, code, notes=None):
        self.rows, self.code, self.notes = rows, code, notes

    def __call__(self, numbers):
        for n in numbers:
            if n in self.rows and (self.notes is None or first_time(self.notes, n)):
                os._exit(self.code)
        return trivial(numbers)


class Complaining:
    """Some rows raise errors with texts that are hard to keep."""

    def __init__(self, texts):
        self.texts = texts

    def __call__(self, numbers):
        for n in numbers:
            if n in self.texts:
                raise ValueError(self.texts[n])
        return trivial(numbers)


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("not even this")


class Returning:
    """Some rows return something that is no list of results."""

    def __init__(self, answers):
        self.answers = answers

    def __call__(self, numbers):
        for n in numbers:
            if n in self.answers:
                if self.answers[n] == "unspeakable":
                    raise Unspeakable
                return self.answers[n]
        return trivial(numbers)


class UnloadableLoudly:
    """Cannot be loaded, and says so at great length."""

    def __init__(self, count):
        self.count = count

    def __reduce__(self):
        return (complain_loudly, (self.count,))

    def __call__(self, numbers):
        return trivial(numbers)


def complain_loudly(count):
    raise ValueError("\ud800" + "x" * count)

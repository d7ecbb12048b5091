"""The checks of arguments: what they let through is what they say, for any value at all."""

import functools
import math
import os
import stat
from typing import Annotated

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raises import raises

import gradkeep as gk
from gradkeep import _arguments
from gradkeep import datamodels as dm
from gradkeep._arguments import Limits, PositiveInt, checked
from gradkeep.errors import FarmError, QueryError
from gradkeep.remat.simulator._simulate import Timeline


class Unshowable:
    def __repr__(self):
        raise RuntimeError("no")


ODD = [
    *(None, True, False, 0, 1, -1, 2**63, -(2**70), 10**400, 0.0, 1.0, 2.5, -0.5),
    *(math.nan, math.inf, -math.inf, "", "x", "3", "\0", "\ud800", b"3", [], [1], (), {}, {1}),
    *(object(), Unshowable(), int, len, 1j, np.int32(3), np.float32(0.5), np.bool_(True)),
    *(np.float64("nan"), np.arange(3), np.zeros((2, 2)), np.array("x"), np.array([3.7])),
    *(torch.tensor(3), torch.tensor(2.5), torch.zeros(2, 2), torch.tensor([True]), range(3)),
]
CHECKS = {
    "count": lambda v: _arguments.count("it", v, error=FarmError, least=1, most=9),
    "number": lambda v: _arguments.number("it", v, error=FarmError, above=0, most=9),
    "fraction": lambda v: _arguments.number("it", v, error=FarmError, least=0, most=1),
    "flag": lambda v: _arguments.flag("it", v, error=FarmError),
    "text": lambda v: _arguments.text("it", v, error=FarmError),
    "texts": lambda v: _arguments.texts("it", v, error=FarmError),
    "one_of": lambda v: _arguments.one_of("it", v, ["x", "y"], error=FarmError),
    "instance": lambda v: _arguments.instance("it", v, (int, float), error=FarmError),
    "file_path": lambda v: _arguments.file_path("it", v, error=FarmError),
    "whole_numbers": lambda v: _arguments.whole_numbers("it", v, error=FarmError),
}
GOOD = {
    "count": lambda v: type(v) is int and 1 <= v <= 9,
    "number": lambda v: type(v) is float and 0 < v <= 9,
    "fraction": lambda v: type(v) is float and 0 <= v <= 1,
    "flag": lambda v: type(v) is bool,
    "text": lambda v: type(v) is str and v != "" and v.encode() and "\0" not in v,
    "texts": lambda v: type(v) is tuple and all(type(one) is str and one.encode() for one in v),
    "one_of": lambda v: v in ("x", "y"),
    "instance": lambda v: isinstance(v, int | float),
    "file_path": lambda v: type(v) is str and v != "" and "\0" not in v,
    "whole_numbers": lambda v: v.dtype == np.int64 and v.ndim == 1 and (v >= 0).all(),
}


@pytest.mark.parametrize("check", CHECKS)
def test_odd_values_become_what_is_promised_or_the_error_that_was_named(check):
    outcomes = {True: 0, False: 0}
    for value in ODD:
        output = None
        try:
            result = CHECKS[check](value)
        except FarmError as error:
            output = error
        outcomes[output is None] += 1
        if output is None:
            assert GOOD[check](result), repr(result)
            continue
        assert output.message.startswith("it must be ")
        assert len(output.message) < 160
        assert "\n" not in output.message
        str(output).encode()
    assert min(outcomes.values()) > 0


@given(st.integers(-5, 15), st.integers(-5, 15), st.integers(-5, 15))
def test_counts_within_their_range_and_no_others(value, least, most):
    if least <= value <= most:
        assert _arguments.count("n", np.int64(value), error=QueryError, least=least, most=most) == (
            value
        )
    else:
        with pytest.raises(QueryError, match="n must be"):
            _arguments.count("n", value, error=QueryError, least=least, most=most)


@given(st.floats(allow_nan=True))
def test_numbers_are_finite(value):
    if math.isfinite(value):
        assert _arguments.number("x", value, error=QueryError) == value
    else:
        with pytest.raises(QueryError, match="x must be"):
            _arguments.number("x", value, error=QueryError)


@pytest.mark.parametrize("value", [[1.0], ["1"], [True, 2], [[1]], "12", 3, {1, 2}, [2**64], [-1]])
def test_lists_of_what_is_not_whole_are_refused_and_never_cut(value):
    with pytest.raises(QueryError, match="ids must be"):
        _arguments.whole_numbers("ids", value, error=QueryError)


def test_whole_numbers_from_arrays_tensors_ranges_and_nothing():
    for value in (np.arange(3, dtype=np.uint8), torch.arange(3), range(3), [0, 1, 2]):
        assert _arguments.whole_numbers("ids", value, error=QueryError).tolist() == [0, 1, 2]
    assert _arguments.whole_numbers("ids", [], error=QueryError).dtype == np.int64


def test_a_word_nearby_is_offered():
    with raises(QueryError, "argument.invalid", fix="'dense'"):
        _arguments.one_of("keep", "dens", ["dense", "exact"], error=QueryError)


def test_only_a_files_place_is_taken(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "nowhere").symlink_to("gone")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    for name in ("file", "new", "link", "no/such/folder"):
        _arguments.file_to_write(tmp_path / name, error=FarmError)
    for name in ("folder", "pipe", "nowhere"):
        with raises(FarmError, "argument.not_a_file"):
            _arguments.file_to_write(tmp_path / name, error=FarmError)


def test_no_writer_of_a_named_file_takes_the_place_of_a_pipe(tmp_path):
    from gradkeep import remat
    from gradkeep.compat.datamodels import _regression

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    numbers = np.ones((2, 2), np.float32)
    data = _regression.RegressionData(dm.Masks.of(numbers > 0), numbers, np.arange(2))

    def recorded():
        with remat.record(pipe):
            torch.ones(2).sum()

    writers = [
        lambda: data.save(pipe),
        lambda: _regression.save_weights(pipe, numbers, numbers[0], numbers[0]),
        lambda: Timeline().write(pipe),
        lambda: gk.memory_budget(0.5).save(pipe),
        recorded,
    ]
    for write in writers:
        with raises(gk.GradkeepError, "argument.not_a_file"):
            write()
        assert stat.S_ISFIFO(pipe.lstat().st_mode)
        assert os.listdir(tmp_path) == ["pipe"]


@checked(FarmError)
def plain(n: int = 1, x: float = 1.0):
    return n, x


@checked(FarmError)
def limited(n: PositiveInt = 1, x: Annotated[float, Limits(above=0, most=9)] = 1.0):
    return n, x


@checked(FarmError)
def optional_limits(n: PositiveInt | None = None):
    return n


@checked(FarmError)
def share(x: Annotated[float, Limits(least=0, below=1)] = 0.5):
    return x


def is_accepted(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except FarmError:
        return False
    return True


@pytest.mark.parametrize("name", ["n", "x"])
def test_ranges_in_annotations_accept_what_the_type_and_a_check_of_the_range_accept(name):
    check = functools.partial(_arguments.count, least=1)
    if name == "x":
        check = functools.partial(_arguments.number, above=0, most=9)
    accepted = 0
    for value in ODD:
        expected = is_accepted(plain, **{name: value}) and is_accepted(
            check, name, value, error=FarmError
        )
        assert is_accepted(limited, **{name: value}) == expected, repr(value)
        accepted += expected
    assert 0 < accepted < len(ODD)


def test_ranges_in_annotations_are_named_in_the_error():
    with raises(FarmError, "argument.invalid", mentions="n must be a whole number of at least 1"):
        limited(n=0)
    with raises(FarmError, "argument.invalid", mentions="above 0 and at most 9, got 9.5"):
        limited(x=9.5)
    with raises(FarmError, "argument.invalid", mentions="of at least 1 or None, got 0"):
        optional_limits(0)
    assert optional_limits(None) is None
    with raises(FarmError, "argument.invalid", mentions="of at least 0 and below 1, got 1"):
        share(1.0)
    assert share(0.9999) == 0.9999

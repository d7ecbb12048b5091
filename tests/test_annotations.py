"""Functions that refuse what their signatures do not allow: by an oracle for each annotation."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from raises import raises
from test_arguments import ODD

from gradkeep._arguments import check_fields, checked
from gradkeep.errors import FarmError, GradkeepError, QueryError


def whole(v):
    try:
        return not isinstance(v, bool | np.bool_) and abs(v.__index__()) < 2**63
    except (AttributeError, TypeError):
        return False


def real(v):
    if isinstance(v, bool | np.bool_) or not isinstance(v, int | float | np.number):
        return False
    if isinstance(v, int):
        return len(str(v)) < 309
    return not isinstance(v, np.complexfloating) and math.isfinite(v)


def text(v):
    return isinstance(v, str) and "\0" not in v and "\ud800" not in v


ORACLES = {
    "int": whole,
    "float": real,
    "str": text,
    "bool": lambda v: isinstance(v, bool | np.bool_),
    "int | None": lambda v: v is None or whole(v),
    "float | str | None": lambda v: v is None or text(v) or real(v),
    "Literal['x', 'y']": lambda v: isinstance(v, str) and v in ("x", "y"),
    "Callable[[int], str]": callable,
    "Mapping[str, Any]": lambda v: isinstance(v, dict),
    "type": lambda v: isinstance(v, type),
    "Any": lambda _: True,
    "NoSuchName": lambda _: True,
    "no.such.name | None": lambda _: True,
    "str | os.PathLike[str]": text,
    "FarmError": lambda _: False,
}


@pytest.mark.parametrize("annotation", ORACLES)
def test_what_fits_is_what_the_annotation_says(annotation):
    def function(value):
        return "called"

    function.__annotations__ = {"value": annotation}
    guarded = checked(QueryError)(function)
    for value in ODD:
        if ORACLES[annotation](value):
            assert guarded(value) == guarded(value=value) == "called"
        else:
            with pytest.raises(QueryError, match="value must be"):
                guarded(value)
            with pytest.raises(QueryError, match="value must be"):
                guarded(value=value)


def test_sequences_are_looked_into():
    @checked(QueryError)
    def function(values: "Sequence[int] | None" = None, names: "Iterable[str]" = ()):
        return values, names

    for good in ([1, 2], (), range(3), np.arange(3), torch.arange(3), None):
        function(good)
    for bad in (["1"], [1.5], "12", np.array(3), torch.tensor(3), 3, {1: 2}, [True], [math.nan]):
        with pytest.raises(QueryError, match="values must be"):
            function(bad)
    with pytest.raises(QueryError, match="names must be"):
        function(names=3)


def test_classes_are_found_by_their_names_and_paths_taken():
    @checked(QueryError)
    def function(error: "GradkeepError", path: "str | os.PathLike[str]" = "x"):
        return path

    assert function(QueryError("x"), Path("y")) == Path("y")
    with pytest.raises(QueryError, match="must be GradkeepError"):
        function(ValueError("x"))


def test_a_message_says_what_would_do():
    @checked(QueryError)
    def function(kind: "Literal['pearson', 'spearman'] | None" = None, share: float = 0.5):
        return kind

    with pytest.raises(QueryError, match="must be 'pearson' or 'spearman' or None"):
        function("kendall")
    with pytest.raises(QueryError, match="share must be"):
        function(share=math.nan)


def test_missing_and_unknown_arguments_are_pythons_to_tell():
    @checked(QueryError)
    def function(one: int):
        return one

    with pytest.raises(TypeError, match="missing 1 required"):
        function()
    with pytest.raises(TypeError, match="unexpected keyword"):
        function(1, two=2)


def test_fields_of_records():
    @dataclass(frozen=True)
    class Record:
        count: "int"
        kind: "Literal['a', 'b']" = "a"
        more: "Mapping[str, Callable[[], Any]] | None" = None

        def __post_init__(self):
            check_fields(self, FarmError)

    assert Record(3, "b", {}).count == 3
    for wrong in ({"count": "3"}, {"count": 1, "kind": "c"}, {"count": 1, "more": 3}):
        with raises(FarmError, "argument.invalid"):
            Record(**wrong)
    assert os


def test_a_name_that_means_anything_elsewhere_still_means_its_class():
    from gradkeep import query
    from gradkeep.compat.trak import projectors

    assert projectors.Gradients is Any
    with pytest.raises(QueryError, match="gradients must be"):
        query.total(3)

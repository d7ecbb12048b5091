"""The description of a form comes from a file: whatever stands there, it is a form or an error of ours."""

import copy
import random

import pytest

from gradkeep.errors import GradkeepError, QueryError
from gradkeep.factors import form_from_fields
from gradkeep.factors._convolution import Convolution
from gradkeep.factors._dense import Dense
from gradkeep.factors._form import Parameter, form_to_fields
from gradkeep.factors._lookup import Lookup
from gradkeep.factors._outer import Outer
from gradkeep.factors._tied import Tied

WEIGHT = (Parameter("w", (3, 4)),)
FORMS = [
    Outer(WEIGHT, "p", "s", 4, 3),
    Dense(WEIGHT, "g", 12),
    Lookup(WEIGHT, "p", "s", 3, 4),
    Tied(WEIGHT, Lookup(WEIGHT, "p", "s", 3, 4), Outer(WEIGHT, "p2", "s2", 4, 3)),
    Convolution(WEIGHT, "p", "s", 1, 2, (4,), (3,), (2,), (1,), (0,), (1,)),
]
ODD = [
    None,
    "",
    "zzz",
    3.5,
    float("nan"),
    True,
    [],
    [1],
    {},
    {"kind": "outer"},
    [[1, 2, 3]],
    b"x",
    1j,
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
def test_a_form_survives_its_description(form):
    assert form_from_fields(form_to_fields(form)) == form


def test_levels_of_factors_are_described_only_if_set():
    form = Outer(WEIGHT, "p", "s", 4, 3, levels=16)
    assert form_from_fields(form_to_fields(form)) == form
    assert "levels" not in form_to_fields(FORMS[0])  # as in schemas of earlier versions


def spoil(draw, fields):
    """Change, drop or add one thing, at any depth."""
    place = draw.choice(list(fields))
    if isinstance(fields[place], dict) and draw.random() < 0.7:
        spoil(draw, fields[place])
    elif isinstance(fields[place], list) and fields[place] and draw.random() < 0.5:
        fields[place][draw.randrange(len(fields[place]))] = draw.choice(ODD)
    elif draw.random() < 0.2:
        del fields[place]
    elif draw.random() < 0.2:
        fields["more"] = draw.choice(ODD)
    else:
        fields[place] = draw.choice(ODD)


def test_spoilt_descriptions_are_refused():
    draw = random.Random(0)
    refused = 0
    for _ in range(3000):
        fields = copy.deepcopy(form_to_fields(draw.choice(FORMS)))
        spoil(draw, fields)
        try:
            form_from_fields(fields)
        except GradkeepError:
            refused += 1
    assert refused > 2000


def test_descriptions_without_end_or_of_another_kind_are_refused():
    endless = {"kind": "tied"}
    endless["lookup"] = endless
    for fields in (endless, None, 3, [], "outer", {"kind": ["outer"]}, {"kind": "nosuch"}):
        with pytest.raises(QueryError):
            form_from_fields(fields)


@pytest.mark.parametrize("shape", [(-1,), (1.5,), ("3",), 3, None, [2, 3]])
def test_a_parameter_has_a_shape(shape):
    with pytest.raises(QueryError, match="shape must be"):
        Parameter("w", shape)

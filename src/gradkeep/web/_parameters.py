"""Query parameters of the web API, with the ranges that requests are validated against."""

# Annotations are evaluated at run time by FastAPI: no `from __future__ import annotations` here.

from dataclasses import dataclass
from typing import Annotated

from fastapi import Query
from pydantic import Field

_NAME = r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,99}"
NAME_PATTERN = f"^{_NAME}$"
_SOURCE_PATTERN = f"^(saved|method|fit|study):{_NAME}$"
MAX_ROW = 2**62

Name = Annotated[str, Query(pattern=NAME_PATTERN)]
Row = Annotated[int, Query(ge=-MAX_ROW, le=MAX_ROW)]
Rows = Annotated[list[Annotated[int, Field(ge=-MAX_ROW, le=MAX_ROW)]], Query(max_length=60)]
Count = Annotated[int, Query(ge=1, le=120)]
Start = Annotated[int, Query(ge=0, le=2**31)]
TopK = Annotated[int, Query(ge=1, le=50)]
Source = Annotated[str, Query(pattern=_SOURCE_PATTERN)]
Sources = Annotated[list[Annotated[str, Field(pattern=_SOURCE_PATTERN)]], Query(max_length=2)]
MapSource = Annotated[str, Query(pattern=f"^(gradients|(fit|study):{_NAME})$")]
Clusters = Annotated[int, Query(ge=1, le=24)]
LogName = Annotated[str, Query(max_length=200)]
Search = Annotated[str, Query(max_length=200)]
Ratio = Annotated[float, Query(gt=0, le=1)]


@dataclass(frozen=True, slots=True)
class Captures:
    """The captures that a request about a query refers to."""

    run: Name = "main"
    queries: Name = "test"
    train: Name = "train"
    name: Name = "main"

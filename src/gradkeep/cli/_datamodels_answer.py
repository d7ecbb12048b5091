"""Answers of analyses as JSON or as text."""

from __future__ import annotations

import dataclasses
from typing import Any


def plain(value: Any) -> Any:
    """The values of a record of arrays, as lists and numbers."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def show(answer: Any) -> None:
    """Print an answer: records of arrays field by field, some in words of their own."""
    from gradkeep.datamodels import Groups, Top

    if isinstance(answer, Top):
        for place, target in enumerate(answer.targets):
            best = ", ".join(_weighed(answer.positive, answer.positive_weights, place))
            worst = ", ".join(_weighed(answer.negative, answer.negative_weights, place))
            print(
                f"target {target}\n    helped by {best or 'none'}\n    hurt by   {worst or 'none'}"
            )
    elif isinstance(answer, Groups):
        for column, target in enumerate(answer.columns):
            print(f"target {target}")
            for place, name in enumerate(answer.names):
                total, share = answer.total[place, column], answer.share[place, column]
                count = answer.counts[place]
                print(f"    {name}  {total:+.3g} by {count} examples, {share:.0%} of all weight")
    else:
        _fields(answer)


def _weighed(ids: Any, weights: Any, place: int) -> list[str]:
    pairs = zip(ids[place], weights[place], strict=True)
    return [f"{example} ({weight:+.3g})" for example, weight in pairs if example >= 0]


def _fields(answer: Any, indent: str = "") -> None:
    import numpy as np

    for field in dataclasses.fields(answer):
        value = getattr(answer, field.name)
        if isinstance(value, np.ndarray):
            text = np.array2string(value, precision=3, threshold=200, edgeitems=5)
            shape = " x ".join(map(str, value.shape))
            inner = f"\n{indent}    "
            print(f"{indent}{field.name} [{shape}]{inner}" + text.replace("\n", inner))
        elif dataclasses.is_dataclass(value):
            print(f"{indent}{field.name}")
            _fields(value, indent + "    ")
        else:
            print(f"{indent}{field.name}  {value}")

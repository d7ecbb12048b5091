"""MetaStore's p2b operators: one product of every sample's gradient with the mean of all queries'."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import gradkeep as gk

if TYPE_CHECKING:
    from gradkeep.query import Gradients

AVERAGED = ("half", "recon")
"""The methods that MetaStore asks about the mean; it adds up the answers of the others."""


def mean_query(
    method: str, queries: Gradients, rows: Gradients, *, memory_budget: int
) -> torch.Tensor:
    """Products `[N]` with the mean query: by `half` from factors, by `recon` from gradients made again.

    Cost: one pass over the kept rows, whatever the number of queries.
    """
    directions = gk.query.mean(queries, memory_budget=memory_budget)
    if method == "half":
        return gk.query.along(rows, directions, memory_budget=memory_budget)[0]
    at_once = max(1, memory_budget // (8 * rows.size))
    found = []
    for some in rows.stream(at_once):
        total = torch.zeros(some.stop - some.start)
        for name, form in rows.forms.items():
            gradients = form.restore(some.factors[name].widened())
            total += (gradients @ directions.layers[name][0].to(gradients.dtype)).float()
        found.append(total)
    answer = torch.cat(found)
    slopes = rows.slopes()
    return answer if slopes is None else answer * slopes

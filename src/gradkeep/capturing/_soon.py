"""Gradients that are made while the backward pass goes on, so that their factors need not wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradkeep.capturing._piece import Piece
from gradkeep.capturing._rules import piece_of
from gradkeep.factors import Dense, DenseRows

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import nn

    from gradkeep.capturing._calls import Call
    from gradkeep.capturing._units import Unit

LATER = ("module", "one by one", "whole")
"""Ways that run the layer once more, some layers at a time."""


class Soon:
    """Dense gradients of the units whose calls all have their suffixes.

    A unit waits until all calls of its modules were passed; modules that belong to several units
    are let go when the last of those is done.
    """

    def __init__(
        self, units: Collection[Unit], calls: Mapping[nn.Module, list[Call]], rows: int
    ) -> None:
        self.pieces: dict[Unit, Piece] = {}
        self._rows = rows
        self._calls = calls
        self._waiting: dict[nn.Module, set[Unit]] = {}
        self._missing: dict[Unit, int] = {}
        for unit in units:
            if unit.way in LATER:
                continue
            modules = list(dict.fromkeys(unit.modules))
            self._missing[unit] = sum(len(calls.get(module, ())) for module in modules)
            for module in modules:
                self._waiting.setdefault(module, set()).add(unit)

    @torch.no_grad()
    def arrived(self, call: Call) -> None:
        """A call has its suffixes."""
        for unit in list(self._waiting.get(call.module, ())):
            self._missing[unit] -= 1
            if self._missing[unit] == 0:
                self._make(unit)
        if self._waiting.get(call.module):
            call.keep_input()

    def _make(self, unit: Unit) -> None:
        modules = list(dict.fromkeys(unit.modules))
        own = [call for module in modules for call in self._calls[module]]
        made = piece_of(unit, own, rows=self._rows)
        if made.form.storage != "dense":
            values = made.form.restore(made.rows)
            form = Dense(made.form.parameters, f"{unit.name}.gradient", values.shape[1])
            made = Piece(form, DenseRows(values))
        self.pieces[unit] = made
        for module in modules:
            self._waiting[module].discard(unit)
            if not self._waiting[module]:
                for call in self._calls[module]:
                    call.let_go()

"""Representations of per-sample gradients: what a layer stores, and the algebra on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradkeep.factors._bits import Bits
from gradkeep.factors._convolution import Convolution
from gradkeep.factors._dense import Dense
from gradkeep.factors._form import form_of_kinds
from gradkeep.factors._lookup import Lookup
from gradkeep.factors._outer import Outer
from gradkeep.factors._tied import Tied

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.factors._form import AnyForm

_FORMS: tuple[type[Any], ...] = (Outer, Convolution, Lookup, Dense, Tied, Bits)
_KINDS = {form.kind: form for form in _FORMS}


def form_from_fields(fields: Mapping[str, Any]) -> AnyForm:
    """Build a form from its JSON fields."""
    form: AnyForm = form_of_kinds(fields, _KINDS)
    return form


def basis_of(form: AnyForm) -> str | None:
    """Return the fingerprint of the basis that rows are coordinates in; None for gradients."""
    return form.basis if isinstance(form, Bits) else None


def is_whitened(form: AnyForm) -> bool:
    """Return True if products are those of whitened gradients: influence, not inner products."""
    return isinstance(form, Bits) and form.whitened

"""What results cannot be named or made of."""

from __future__ import annotations

import operator
import re
from typing import Any

from gradkeep.errors import AttributionError

_EXPERIMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,59}")


class ModelIDException(Exception):
    """A model id that is unknown, taken, not complete or not finalized."""


class MissingTargets(AttributionError):
    """Targets of an experiment that were never scored at a model id."""

    def __init__(self, exp_name: str, model_id: int, missing: list[int]) -> None:
        some = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        super().__init__(
            f"{len(missing)} targets of experiment {exp_name!r} were not scored at model id "
            f"{model_id}",
            found=f"no gradients of targets {some}",
            fix="score them, or pass allow_skip=True to leave this model id out",
        )


def checked_experiment(exp_name: str) -> str:
    """The name, if it can be one."""
    if not isinstance(exp_name, str) or not _EXPERIMENT.fullmatch(exp_name):
        raise ValueError(
            f"{exp_name!r} cannot name an experiment: use 1 to 60 letters, digits or _ . + = @ -, "
            "not beginning with a dot or sign"
        )
    return exp_name


def checked_model_id(model_id: Any) -> int:
    """The id as a whole number."""
    try:
        return operator.index(model_id)
    except TypeError:
        raise TypeError(f"a model id must be a whole number, not {model_id!r}") from None

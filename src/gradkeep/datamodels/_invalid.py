"""What was given cannot be regressed or analysed."""

from __future__ import annotations

from gradkeep._errors import GradkeepError


class DatamodelsError(GradkeepError, ValueError):
    """Masks, outputs or options that no datamodel can be fitted with or asked about."""

"""Configuration files: mappings in JSON or YAML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os

    from gradkeep.errors import GradkeepError


def read_config(path: str | os.PathLike[str], *, error: type[GradkeepError]) -> dict[str, Any]:
    """Read a configuration file, which must hold a mapping."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise error(
            "the configuration cannot be read",
            code="config.unreadable",
            path=path,
            found=problem,
        ) from problem
    return parse_config(text, path=path, error=error)


def parse_config(
    text: str, *, path: str | os.PathLike[str], error: type[GradkeepError]
) -> dict[str, Any]:
    """Parse a mapping in JSON, or else in YAML.

    >>> from gradkeep.errors import RematError
    >>> parse_config("models: [lstm]", path="config.yaml", error=RematError)
    {'models': ['lstm']}
    """
    import yaml

    try:
        try:
            content = json.loads(text)
        except ValueError:
            content = yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as problem:
        raise error(
            "the configuration is neither JSON nor YAML",
            code="config.syntax",
            path=path,
            found=" ".join(str(problem).split())[:300],
        ) from problem
    if not isinstance(content, dict):
        raise error(
            "the configuration is not a mapping",
            code="config.not_a_mapping",
            path=path,
            found=type(content).__name__,
        )
    return content

"""What the paths of a MetaStore configuration mean: a leading slash is no root there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WorkingFolder:
    """The folder that MetaStore is run in, and the one that its configuration lies in."""

    current: Path
    config: Path

    @classmethod
    def of(cls, config: Path) -> WorkingFolder:
        """The current folder, if the configuration lies in it or below; else the configuration's own."""
        home, here = config.resolve().parent, Path.cwd()
        return cls(here if home.is_relative_to(here) else home, home)

    def candidates(self, given: str) -> list[Path]:
        """Where a path to read may be, the likeliest first.

        >>> WorkingFolder(Path("run"), Path("run")).candidates("/data/cifar10/")
        [PosixPath('run/data/cifar10'), PosixPath('/data/cifar10')]
        """
        relative = given.lstrip("/")
        absolute = [Path(given)] if given.startswith("/") else []
        places = [self.current / relative, self.config / relative, *absolute]
        return list(dict.fromkeys(places))

    def find(self, given: str) -> Path:
        """The first candidate that exists; if none does, the first."""
        places = self.candidates(given)
        return next((place for place in places if place.exists()), places[0])

"""Which logs are meant: files, folders of them, or manifests, with the titles that these give them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep.errors import RematError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class TitledLog:
    """A log with what a picture calls it."""

    path: Path
    title: str


@dataclass(frozen=True, slots=True)
class LogList:
    """The logs, and what was passed over."""

    logs: tuple[TitledLog, ...]
    notes: tuple[str, ...] = ()


def find_logs(places: Sequence[str | os.PathLike[str]]) -> LogList:
    """The logs that files, folders and manifests name, in their order and each once.

    A folder stands for its `manifest.json`, or without one for all its `.log` files. A manifest lists
    its models under `models`, or per model as `simrd_config` of an experiment does; paths in it are
    taken from where it lies or from the folder above. What it names and is not there is passed over
    with a note, as the original does.
    """
    found: dict[Path, TitledLog] = {}
    notes: list[str] = []
    for place in map(Path, places):
        if place.is_dir():
            manifest = place / MANIFEST
            logs = _listed(manifest, notes) if manifest.is_file() else _every(place)
        elif place.suffix == ".json":
            logs = _listed(place, notes)
        elif place.is_file():
            logs = iter([_titled(place)])
        else:
            raise RematError(
                "there is no such log", path=place, expected="logs, a folder of them, a manifest"
            )
        before = len(found)
        for log in logs:
            found.setdefault(log.path, log)
        if len(found) == before and not any(notes):
            raise RematError("no logs in here", path=place, expected="files named .log")
    if not found:
        raise RematError("none of the logs is there", found="; ".join(notes))
    return LogList(tuple(found.values()), tuple(notes))


def _titled(path: Path) -> TitledLog:
    return TitledLog(path, path.name.split("-")[0])


def _every(folder: Path) -> Iterator[TitledLog]:
    return (_titled(path) for path in sorted(folder.glob("*.log")))


def _listed(manifest: Path, notes: list[str]) -> Iterator[TitledLog]:
    try:
        content = json.loads(manifest.read_text())
    except (OSError, ValueError) as error:
        raise RematError(
            "the manifest cannot be read", path=manifest, found=str(error).splitlines()[0]
        ) from error
    for at, entry in enumerate(_entries(manifest, content), 1):
        if not isinstance(entry, dict) or not isinstance(entry.get("log"), str):
            raise RematError(
                f"model {at} of the manifest names no log",
                path=manifest,
                found=repr(entry)[:80],
                expected='{"name": ..., "log": "logs/a.log"}',
            )
        name = str(entry.get("title") or entry.get("name") or Path(entry["log"]).stem)
        if entry.get("has_start") is False:
            raise RematError(
                f"has_start of {name!r} is false: a log is read from its annotation START on",
                path=manifest,
                fix='add {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"} as its first line',
            )
        log = _placed(manifest, entry["log"])
        if log is None:
            notes.append(f"{manifest}: {name!r} is passed over, {entry['log']} is not there")
            continue
        yield TitledLog(log, name)


def _entries(manifest: Path, content: Any) -> list[Any]:
    models = content.get("models") if isinstance(content, dict) else None
    if isinstance(models, list):
        return models
    if isinstance(content, dict) and all(isinstance(part, list) for part in content.values()):
        return [entry for part in content.values() for entry in part]
    raise RematError(
        "this is no manifest of logs",
        path=manifest,
        found=type(content).__name__,
        expected='{"models": [{"name": ..., "log": ...}]}, or a list of such per model',
    )


def _placed(manifest: Path, log: str) -> Path | None:
    places = (manifest.parent / log, manifest.parent.parent / log, manifest.parent / Path(log).name)
    return next((place for place in places if place.is_file()), None)

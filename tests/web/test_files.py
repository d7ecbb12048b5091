"""The files of the page: those of other projects are what was taken, and none is missing."""

import hashlib
import json
import re

import pytest

from gradkeep.web._http import static_files


def test_vendored_files_are_those_of_the_manifest_and_carry_licences():
    known = json.loads(static_files()["vendor/manifest.json"].content)["files"]
    for one in known:
        content = static_files()[f"vendor/{one['file']}"].content
        assert hashlib.sha256(content).hexdigest() == one["sha256"]
    there = {name.removeprefix("vendor/") for name in static_files() if name.startswith("vendor/")}
    assert there == {one["file"] for one in known} | {"manifest.json"}
    for package in {one["package"] for one in known}:
        assert f"{package}-LICENSE.txt" in there
    assert all(one["licence"] and re.fullmatch(r"\d+\.\d+\.\d+", one["version"]) for one in known)


@pytest.mark.parametrize(
    "name", [n for n in static_files() if n.endswith((".js", ".css", ".html"))]
)
def test_files_name_nothing_outside_of_the_machine_and_nothing_that_is_missing(name):
    text = static_files()[name].content.decode()
    if not name.startswith("vendor/"):
        assert not re.findall(r"(?:https?:)?//[\w-]+\.\w+", text)
    folder = name.rpartition("/")[0]
    for other in re.findall(r'(?:from|import) "\./([\w/.-]+)"', text):
        assert f"{folder}/{other}".strip("/") in static_files()
    for other in re.findall(r'(?:src|href)="static/([\w/.-]+)"', text):
        assert other in static_files()

"""The project keeps its own promises: versions, pins, portable files, documentation that runs."""

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gradkeep
from gradkeep.cli._app import COMMANDS, GROUPS
from gradkeep.remat.simulator import _heuristics
from gradkeep.store.backends import _backend

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = [p for p in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if p.exists()]


def canonical(requirement: str) -> str:
    """The name in a requirement, as package indexes compare it."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name, f"not a requirement: {requirement!r}"
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def committed_files() -> list[Path]:
    git = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if git.returncode:
        pytest.skip("not a git checkout")
    names = [os.fsdecode(name) for name in git.stdout.split(b"\0") if name]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def test_version_is_the_one_in_pyproject():
    assert gradkeep.__version__ == PROJECT["version"]


def test_every_dependency_is_pinned():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    loose = [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+", pin)]
    assert not loose, "pins are canonical names with exact versions, free of local suffixes"
    assert pins == sorted(pins)

    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    named = {canonical(requirement) for group in groups for requirement in group}
    missing = named - {canonical(pin) for pin in pins} - {"gradkeep"}
    assert not missing, f"add exact versions of {sorted(missing)} to constraints.txt"


def test_no_file_names_a_place_on_one_machine():
    # Spelt with a character class, so that this file does not contain what it looks for.
    pattern = re.compile(rb"(?<![\w.~*-])/(?:[w]ork|[r]oot|[h]ome/\w+|[U]sers/\w+)/")
    result = []
    for path in committed_files():
        content = path.read_bytes()
        if b"\0" in content[:8192]:
            continue
        for number, line in enumerate(content.splitlines(), 1):
            if pattern.search(line):
                result.append(f"{path.relative_to(ROOT)}:{number}")
    assert not result


@pytest.mark.parametrize("arguments", [[], ["--help"]], ids=["bare", "help"])
def test_x_lists_its_tasks_without_installing(tmp_path, arguments):
    venv = tmp_path / "venv"
    run = subprocess.run(
        [getattr(sys, "_base_executable", sys.executable), str(ROOT / "x"), *arguments],
        env={**os.environ, "GRADKEEP_VENV": str(venv)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    for task in ("demo", "test", "check", "bench", "docs", "shell"):
        assert f"./x {task}" in run.stdout
    assert not list(tmp_path.iterdir())


def test_x_refuses_an_unknown_task_without_installing(tmp_path):
    run = subprocess.run(
        [sys.executable, str(ROOT / "x"), "tset"],
        env={**os.environ, "GRADKEEP_VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 1
    assert "'tset'" in run.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "mkdocstrings")),
    reason="the extra docs is not installed",
)
def test_documentation_builds_and_loads_nothing_from_elsewhere(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        check=True,
        timeout=110,
    )
    for page in tmp_path.rglob("*.html"):
        html = page.read_text()
        loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?:)?//[^\s\">]*", html)
        assert not loaded, f"{page.name} loads {loaded}"
    for page in (ROOT / "docs" / "api").glob("*.md"):
        room = "gradkeep" if page.stem == "gradkeep" else f"gradkeep.{page.stem}"
        html = (tmp_path / "api" / f"{page.stem}.html").read_text()
        names = getattr(importlib.import_module(room), "__all__", ())
        missing = {name for name in names if f'id="{room}.{name}"' not in html}
        missing -= {other.stem for other in page.parent.glob("*.md")}  # rooms have their own page
        assert not missing, f"{page.name} says nothing of {missing}: they need docstrings"


def test_what_the_map_names_is_where_it_says():
    text = re.sub(
        r"```.*?```", "", (ROOT / "docs" / "architecture.md").read_text(), flags=re.DOTALL
    )
    source = ROOT / "src" / "gradkeep"
    files = set(re.findall(r"`([\w/]+/\w+\.py)`", text))
    assert len(files) > 40
    missing = [name for name in files if not any((at / name).exists() for at in (source, ROOT))]
    assert not missing
    for name, file in re.findall(r"`([\w.]+)`(?: in| \()\s*`([\w/]+\.py)`", text):
        defined = rf"^\s*(?:def|class) {name.rpartition('.')[2]}\b"
        assert re.search(defined, (source / file).read_text(), re.MULTILINE), f"{name} in {file}"


def test_every_command_is_in_the_documentation_with_its_options():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = hooks.commands_page()
    parts = dict(re.findall(r"^##+ (gradkeep .+)\n((?:(?!##).*\n)*)", page, re.MULTILINE))
    assert all(f"gradkeep {group}" in parts for group in GROUPS)
    for command in COMMANDS:
        part = parts[f"gradkeep {command.group or ''} {command.name}".replace("  ", " ")]
        function = command.load()
        assert inspect.getdoc(function).splitlines()[0] in part
        assert part.count("\n| `") == len(inspect.signature(function).parameters), command.name


def python_blocks(text: str) -> list[tuple[int, str]]:
    """The runnable blocks of a page as (line number of the first line, code)."""
    fence = re.compile(
        r"^(?P<mark><!-- not run -->[ \t]*\n)?(?P<indent>[ \t]*)```python[ \t]*\n(?P<code>.*?)^[ \t]*```[ \t]*$",
        re.MULTILINE | re.DOTALL,
    )
    blocks = []
    for match in fence.finditer(text):
        if match["mark"] is None:
            line = text.count("\n", 0, match.start("code")) + 1
            blocks.append((line, re.sub(rf"(?m)^{match['indent']}", "", match["code"])))
    return blocks


def test_python_blocks_are_found_and_marked_ones_left_out():
    page = (
        "a\n```python\nx = 1\n```\n\n<!-- not run -->\n```python\nboom\n```\n```console\nls\n```\n"
    )
    assert python_blocks(page) == [(3, "x = 1\n")]


@pytest.fixture
def _registries(monkeypatch):
    """Heuristics and schemes stay registered for the life of a process: not for other tests, though."""
    monkeypatch.setattr(_heuristics, "_registry", {**_heuristics._registry})
    monkeypatch.setattr(_heuristics, "_own", {*_heuristics._own})
    monkeypatch.setattr(_backend, "_factories", {**_backend._factories})


@pytest.mark.usefixtures("_registries")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_in_the_documentation_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, code in python_blocks(page.read_text()):
        # Padding makes a traceback point at the line of the page.
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)

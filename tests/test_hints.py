"""What errors tell people to do can be done: flags, arguments, commands and extras that exist."""

import ast
import functools
import inspect
import operator
import re
import tomllib
from pathlib import Path

import click
import pytest
import typer

import gradkeep
from gradkeep.cli import _app

SOURCES = sorted(Path(gradkeep.__file__).parent.rglob("*.py"))
FOREIGN_FLAGS = {"--relink"}
"""Flags of other programs that hints name."""
FOREIGN_ARGUMENTS = {
    *("bitorder", "drop_last", "is_trainable", "modules_to_save", "orient", "requires_grad"),
    *("remove_unused_columns", "save_only_model", "scale_grad_by_freq", "shuffle"),
    *("target_modules", "use_dora"),
}
"""Arguments of torch, transformers, peft, numpy and pandas that hints name."""


@functools.cache
def nodes():
    """The parts of all modules that tell of errors and arguments, each parsed once."""
    kinds = (ast.Call, ast.FunctionDef, ast.AsyncFunctionDef, ast.AnnAssign)
    return [
        (path.name, node)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds)
    ]


def texts(call):
    """The constant texts of the keyword arguments of a call that people read."""
    for keyword in call.keywords:
        if keyword.arg in ("fix", "expected"):
            for node in ast.walk(keyword.value):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def hints():
    for name, node in nodes():
        if isinstance(node, ast.Call):
            for text in texts(node):
                yield name, text


def known_arguments():
    """All names that some function takes or some class has as a field."""
    result = set()
    for _, node in nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            values = node.args
            result |= {one.arg for one in (*values.posonlyargs, *values.args, *values.kwonlyargs)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            result.add(node.target.id)
    return result


@functools.cache
def commands():
    """Every command with its flags, by its words."""
    result = {}
    for command in _app.COMMANDS:
        words = (command.name,) if command.group is None else (command.group, command.name)
        group = typer.main.get_command(_app.build_app(words))
        for word in words:
            group = group.commands[word]
        flags = {
            flag
            for parameter in group.params
            if isinstance(parameter, click.Option) or hasattr(parameter, "secondary_opts")
            for flag in (*parameter.opts, *parameter.secondary_opts)
        }
        result[words] = flags | {"--help", "--version"}
    return result


def test_every_flag_in_a_hint_exists():
    known = set().union(*commands().values()) | FOREIGN_FLAGS
    for path in SOURCES:  # programs of compat
        known |= set(re.findall(r'add_argument\(\s*"(--[a-z_-]+)"', path.read_text()))
    wrong = [
        (name, flag)
        for name, text in hints()
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z_-]+", text)
        if flag not in known
    ]
    assert wrong == []


def test_every_command_in_a_hint_exists_and_has_its_flags():
    known = commands()
    wrong = []
    for name, text in hints():
        for line in re.findall(r"\bgradkeep ((?:[a-z-]+ ?)+[^;,`]*)", text):
            words = line.split()
            result = tuple(words[:2]) if tuple(words[:2]) in known else tuple(words[:1])
            flags = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", line))
            if words[0] not in {one[0] for one in known}:
                continue  # a sentence about gradkeep, not a command
            if result not in known or not flags <= known[result]:
                wrong.append((name, line))
    assert wrong == []


PAGES = sorted(Path(gradkeep.__file__).parent.glob("web/static/*.js"))
DOCS = [
    Path(__file__).parents[1] / "README.md",
    *sorted(Path(__file__).parents[1].glob("docs/*.md")),
]


@pytest.mark.parametrize("path", [*PAGES, *DOCS], ids=lambda path: path.name)
def test_every_command_on_a_page_has_its_flags(path):
    known = commands()
    wrong = []
    for line in re.findall(
        r"(?:^|[`$\"'\[ ])gradkeep ([a-z][a-z-]+[^\n`\"'#;|]*)", path.read_text()
    ):
        line = line.partition(" -- ")[0]  # behind it are flags of the user's script
        words = line.split()
        result = tuple(words[:2]) if tuple(words[:2]) in known else tuple(words[:1])
        flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", line))
        if flags and (result not in known or not flags <= known[result]):
            wrong.append(line)
    assert wrong == []


def test_every_argument_in_a_hint_exists():
    known = known_arguments()
    wrong = [
        (name, argument, text)
        for name, text in hints()
        for argument in re.findall(r"(?<![\w.\-])([a-z][a-z_]+)=(?!=)", text)
        if argument not in known | FOREIGN_ARGUMENTS
    ]
    assert wrong == []


def test_every_call_in_a_hint_takes_its_arguments():
    wrong = []
    for name, text in hints():
        for dotted, values in re.findall(r"\bgk\.([A-Za-z_.]+)\(([^()]*)\)", text):
            function = operator.attrgetter(dotted)(gradkeep)
            parameters = inspect.signature(function).parameters.values()
            known = {one.name for one in parameters}
            anything = any(one.kind is one.VAR_KEYWORD for one in parameters)
            named = set(re.findall(r"\b([a-z_]+)=(?!=)", values))
            if not named <= known and not anything:
                wrong.append((name, text))
    assert wrong == []


def test_extras_in_hints_exist_and_are_installed_from_a_checkout():
    from gradkeep._environment import install_hint

    extras = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    known = set(extras["project"]["optional-dependencies"])
    for path in SOURCES:
        text = path.read_text()
        assert not re.search(r"pip install \W*gradkeep\b", text), path
        assert set(re.findall(r'install_hint\("([a-z0-9]+)"\)', text)) <= known, path
    assert "-e" in install_hint("web")
    assert "[web]" in install_hint("web")
    for page in (Path(__file__).parents[1] / "docs").glob("*.md"):
        assert not re.search(r"pip install \W*gradkeep\b", page.read_text()), page


@pytest.mark.parametrize("words", [("report",), ("serve",)])
def test_the_page_without_its_extra_names_how_to_install_it(words, inline, monkeypatch, tmp_path):
    import sys

    gradkeep.open(tmp_path / "store")
    for name in [one for one in sys.modules if one.startswith("gradkeep.web")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("fastapi", "starlette", "uvicorn", "anyio", "h11"):
        for loaded in [one for one in sys.modules if one.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delattr(gradkeep, "web", raising=False)
    done = inline(*words, tmp_path / "store")
    assert done.returncode == 2, done.stderr
    assert "[web]" in done.stderr

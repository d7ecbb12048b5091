"""A store whose content names code and whose folder holds code: nothing of it is ever run."""

import inspect
import os
import shutil
import subprocess
import sys

import pytest
import torch

import gradkeep as gk
from gradkeep import evaluate
from gradkeep.cli._app import COMMANDS
from gradkeep.datamodels import Training

SHADOWED = ("duckdb", "yaml", "matplotlib", "cloudpickle", "pandas", "uvicorn")
"""Modules that commands import on the way: planted in the store's folder under the same names."""

LINES = {
    "info": ["STORE"],
    "verify": ["STORE"],
    "sql": ["STORE", "select count(*) from samples"],
    "attribute": ["STORE", "--method", "dot"],
    "why": ["STORE", "1", "--method", "dot"],
    "suspects": ["STORE", "--relabel", "out.csv"],
    "serve": ["STORE", "--host", "0.0.0.0"],
    "report": ["STORE", "--out", "report.html"],
    "select": ["STORE", "--keep", "3", "--method", "dot"],
    "leaks": ["STORE"],
    "check-removal": ["STORE", "1,2", "--method", "dot"],
    "evaluate truth": ["STORE", "--workers", "0"],
    "evaluate lds": ["STORE", "--method", "dot"],
    "evaluate labels": ["STORE"],
    "evaluate removal": ["STORE", "--method", "dot", "--workers", "0"],
    "evaluate leakage": ["STORE", "--method", "dot"],
    "evaluate sanity": ["STORE", "--method", "dot"],
    "evaluate all": ["STORE"],
    "evaluate compare": ["STORE", "a", "b"],
    "gc": ["STORE", "--dry-run"],
    "delete": ["STORE", "scores/none"],
    "datamodels init": ["STORE", "--spec", "spec.json"],
    "datamodels work": ["STORE", "--main", "evil", "--name", "truth"],
    "datamodels run": ["STORE", "--main", "evil", "--name", "truth"],
    "datamodels status": ["STORE"],
    "datamodels fit": ["STORE"],
    "datamodels analyze": ["STORE", "counterfactual"],
    "datamodels export": ["STORE", "exported"],
    "import trak": ["STORE", "STORE"],
    "plan": ["STORE/evil.yaml"],
    "capture": ["STORE/evil.yaml"],
}
"""A command line for every command that is given a store."""


@pytest.fixture(scope="module")
def created(tmp_path_factory):
    """Captures and a ground truth that names a recipe inside of the store's own folder."""
    folder = tmp_path_factory.mktemp("hostile") / "store"
    store = gk.open(folder, durability="process")
    torch.manual_seed(0)
    rows = (torch.randn(12, 4), torch.arange(12) % 2)
    model = torch.nn.Linear(4, 2)
    training = Training(lambda: torch.nn.Linear(4, 2), epochs=1, batch_size=6)
    how = evaluate.Recipe(rows, rows, training, source=f"{folder}/evil.py:make")
    evaluate.ground_truth(store, how, subsets=10, seeds=1, workers=0)
    for split in ("train", "test"):
        options = {"task": gk.Classification(), "split": split, "progress": False}
        gk.capture(store, model, [rows], **options)
    return folder


@pytest.fixture
def hostile(created, tmp_path):
    """The store with code in its folder, and the file that this code would leave behind."""
    folder = shutil.copytree(created, tmp_path / "store")
    mark = tmp_path / "executed"
    code = f"open({str(mark)!r}, 'a').write(__name__)\ndef make(*_, **__):\n    return 1\nmain = make\n"
    for name in ("evil", *SHADOWED):
        (folder / f"{name}.py").write_text(code)
    (folder / "evil.yaml").write_text(
        "store: .\nmodel: {from: 'evil:make'}\ntask: {from: 'evil:make'}\n"
        "splits: {train: {from: 'evil:make'}}\n"
    )
    return folder, mark


def words_of(command):
    return command.name if command.group is None else f"{command.group} {command.name}"


def test_every_command_about_a_store_is_tried():
    about = {
        words_of(command)
        for command in COMMANDS
        if {"store", "config"} & set(inspect.signature(command.load()).parameters)
    }
    assert about - {"metastore sweep", "remat experiments"} <= set(LINES)


@pytest.mark.parametrize("place", ["outside", "inside", "truth in a file"])
def test_no_command_runs_what_a_store_holds(created, hostile, inline, monkeypatch, place):
    folder, mark = hostile
    if place == "truth in a file":  # the recorded recipe exists, where the ground truth was made
        shutil.copy(folder / "evil.py", created / "evil.py")
    for words, rest in LINES.items():
        if place == "inside":
            monkeypatch.chdir(folder)
        where = "." if place == "inside" else str(folder)
        done = inline(*words.split(), *(item.replace("STORE", where) for item in rest))
        assert done.returncode in (0, 1, 2, 3), (words, done.stderr)
        assert not mark.exists(), words
    (created / "evil.py").unlink(missing_ok=True)


def test_a_recipe_of_a_store_is_a_name_that_is_shown(hostile, inline):
    folder, _ = hostile
    for words in (["evaluate", "removal"], ["evaluate", "all"], ["check-removal"]):
        done = inline(*words, folder, *(["1,2"] if words == ["check-removal"] else []))
        output = done.stdout + done.stderr
        assert "evil.py:make" in output, words
        assert "--recipe" in output, words


@pytest.mark.parametrize("named", ["evil.py:make", "evil:make"])
def test_code_inside_a_store_is_refused_even_by_name(hostile, inline, monkeypatch, named):
    folder, mark = hostile
    monkeypatch.chdir(folder)
    done = inline("evaluate", "removal", ".", "--recipe", named)
    assert done.returncode == 2
    assert "move it out of the store" in done.stderr
    monkeypatch.chdir(folder.parent)
    done = inline("evaluate", "removal", "store", "--recipe", f"store.{named}")
    assert done.returncode == 2
    assert not mark.exists()


@pytest.mark.parametrize(
    "line",
    [
        ["sql", ".", "select count(*) from samples"],
        pytest.param(["attribute", ".", "--workers", "2"], marks=pytest.mark.slow),
    ],
)
def test_a_process_that_is_started_in_a_store_imports_nothing_of_it(hostile, line):
    folder, mark = hostile
    done = subprocess.run(
        [sys.executable, "-m", "gradkeep", *line],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "GRADKEEP_CACHE": "off"},
    )
    assert done.returncode == 0, done.stderr
    assert not mark.exists()


def test_no_question_to_the_page_runs_what_a_store_holds(hostile, monkeypatch):
    testclient = pytest.importorskip("starlette.testclient")
    from gradkeep.web._app import create_app
    from gradkeep.web._guard import Access

    folder, mark = hostile
    monkeypatch.chdir(folder)
    app = create_app(str(folder), access=Access("t"))
    headers = {"x-gradkeep-token": "t"}
    client = testclient.TestClient(app, base_url="http://127.0.0.1", headers=headers)
    values = {"query": 1, "row": 1, "source": "method:dot", "log": "evil.py", "action": "accept"}
    for path, methods in client.get("/api/openapi.json").json()["paths"].items():
        for method in methods:
            options = {"json": {}} if method == "post" else {"params": values}
            assert client.request(method, path, **options).status_code < 500, path
            assert not mark.exists(), path
    output = client.post("/api/suspects/retrained", json={})
    assert output.status_code == 409
    assert "--recipe" in output.text

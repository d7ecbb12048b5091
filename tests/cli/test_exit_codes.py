"""Every command ends in one way: a message, an exit code, and never a traceback of ours."""

import json
import os
import signal
import stat
import subprocess
import sys

import pytest

import gradkeep as gk
from gradkeep.cli import _app, _errors


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gradkeep" / "reports"


def fail_with(monkeypatch, error):
    """Have a function deep inside of gradkeep raise."""
    from gradkeep.store.catalog import _info

    code = compile(
        "def boom(*_, **__):\n    secret = 'the rows'\n    raise error", _info.__file__, "exec"
    )
    names = {"error": error, "__name__": _info.__name__}
    exec(code, names)
    monkeypatch.setattr(gk.Store, "info", names["boom"])


def test_an_error_of_ours_is_one_line_with_a_report(inline, folder, cache, monkeypatch):
    fail_with(monkeypatch, KeyError("x" * 5000))
    run = inline("info", folder)
    assert (run.returncode, run.stdout) == (70, "")
    assert run.stderr.count("\n") == 1
    assert run.stderr.startswith("gradkeep: this is an error of gradkeep itself (KeyError at ")
    (report,) = cache.iterdir()
    assert str(report) in run.stderr
    assert "read and report" in run.stderr
    text = report.read_text()
    for part in (
        f"gradkeep {gk.__version__}",
        "command: gradkeep info\n",
        "torch ",
        "KeyError",
        "in boom",
    ):
        assert part in text
    assert str(folder) not in text.replace(str(os.path.dirname(__file__)), "")
    assert "the rows" not in text
    assert "x" * 300 not in text


def test_an_error_of_ours_is_json_too(inline, folder, cache, monkeypatch):
    fail_with(monkeypatch, RuntimeError("why"))
    run = inline("info", folder, "--json")
    output = json.loads(run.stdout)["error"]
    assert (run.returncode, run.stderr, output["type"]) == (70, "", "RuntimeError")
    assert os.path.exists(output["report"])


def test_reports_do_not_pile_up_and_may_have_no_place(inline, folder, cache, monkeypatch, tmp_path):
    fail_with(monkeypatch, RuntimeError("why"))
    for _ in range(23):
        assert inline("info", folder).returncode == 70
    assert len(list(cache.iterdir())) == 20
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "file"))
    run = inline("info", folder)
    assert run.returncode == 70
    assert "please report this line" in run.stderr


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            PermissionError(13, "Permission denied", "/some/place"),
            2,
            "/some/place: system error",
        ),
        (OSError(28, "No space left on device"), 2, "No space left"),
        (MemoryError(), 2, "not enough memory"),
        (KeyboardInterrupt(), 130, ""),
        (RecursionError("deep"), 70, "RecursionError"),
        (OSError("without a number"), 70, "OSError"),
    ],
    ids=["permission", "disk", "memory", "interrupt", "recursion", "unknown"],
)
def test_what_the_system_says_is_told_and_the_rest_is_ours(
    inline, folder, cache, monkeypatch, error, code, words
):
    fail_with(monkeypatch, error)
    run = inline("info", folder)
    assert run.returncode == code
    assert words in run.stderr
    assert "Traceback" not in run.stderr


def test_the_users_script_shows_the_users_frames_only(inline, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def deeper():\n    torch.ones(2) @ torch.ones(3)\n"
        "def step():\n"
        "    try:\n        deeper()\n"
        "    except RuntimeError as error:\n        raise ZeroDivisionError('mine') from error\n"
    )
    run = inline("remat", "record", "mine.py")
    assert run.returncode == 4
    assert "ZeroDivisionError: mine" in run.stderr
    assert "in deeper" in run.stderr
    assert "mine.py" in run.stderr
    assert "gradkeep/cli" not in run.stderr
    output = json.loads(inline("remat", "record", "mine.py", "--json").stdout)["error"]
    assert output["type"] == "ZeroDivisionError"
    assert "in deeper" in output["traceback"]


def test_a_model_of_the_users_shows_the_users_frames_only(inline, tmp_path):
    (tmp_path / "mine_model.py").write_text(
        "from torch import nn\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.l = nn.Linear(64, 10)\n"
        "    def forward(self, x):\n        return self.l(x[:, :3])\n"
    )
    (tmp_path / "c.yaml").write_text(
        "store: kept\nmodel: {from: 'mine_model:Model'}\ndata: {train: {kind: digits, rows: 8}}\n"
    )
    run = inline("capture", "c.yaml")
    assert run.returncode in (2, 4), run.stderr
    assert "gradkeep/cli" not in run.stderr
    (tmp_path / "c.yaml").write_text(
        "store: kept\nmodel: {from: 'mine_model:Model', size: 3}\ndata: {train: {kind: digits}}\n"
    )
    run = inline("capture", "c.yaml")
    assert run.returncode == 2
    assert "size" in run.stderr


def test_endless_messages_are_cut(inline, folder, cache, monkeypatch):
    fail_with(monkeypatch, gk.errors.StoreError("a" * 10_000_000))
    run = inline("info", folder)
    assert run.returncode == 2
    assert len(run.stderr) < 70_000


def test_a_closed_or_full_output_is_no_traceback(folder, tmp_path):
    def shell(redirect):
        return subprocess.run(
            [
                "sh",
                "-c",
                f'exec "$@" {redirect}',
                "sh",
                sys.executable,
                "-m",
                "gradkeep",
                "info",
                "store",
            ],
            cwd=folder.parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        )

    closed = shell(">&-")
    assert (closed.returncode, closed.stderr) == (0, "")
    if stat.S_ISCHR(os.stat("/dev/full").st_mode):  # where it is something else, leave it alone
        full = shell("> /dev/full")
        assert full.returncode == 2
        assert full.stderr == "gradkeep: system error: No space left on device\n"


def test_names_that_no_encoding_has_can_be_printed(gradkeep, folder):
    odd = os.fsdecode(b"st\xffre")
    os.rename(folder, folder.parent / odd)
    for more in ([], ["--json"]):
        run = gradkeep("info", odd, *more)
        assert run.returncode == 0, run.stderr
        if more:
            assert json.loads(run.stdout)
    assert gradkeep("info", odd + "x").returncode == 2


def test_the_table_of_exit_codes_is_complete():
    named = {v for k, v in vars(_errors).items() if k.isupper() and isinstance(v, int)}
    output = {
        int(line.split("|")[1])
        for line in _errors.__doc__.splitlines()
        if line[:3].strip("| ").isdigit()
    }
    assert named <= output
    assert {0, 1, 2, 3, 4, 70, 130, 141, 143} == output


def test_termination_of_a_farm_has_the_usual_code(inline, folder, monkeypatch):
    from gradkeep.datamodels import _contract as study

    def terminated(*_, **__):
        raise SystemExit(128 + signal.SIGTERM)

    monkeypatch.setattr(study, "status", terminated)
    assert inline("datamodels", "status", folder).returncode == 143


def test_every_command_is_named_in_reports():
    for command in _app.COMMANDS:
        assert _app.known_words(command.words) == command.words
    assert _app.known_words(("secret",)) == ()

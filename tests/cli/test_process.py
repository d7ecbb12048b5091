"""The command as a process: quick, light, quiet when stopped, usable where writing is forbidden."""

import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

import gradkeep as gk

HEAVY = "('torch', 'numpy', 'pyarrow', 'duckdb', 'pandas')"


def loaded_after(arguments, cwd):
    """What of the heavy packages a command line has imported when it ends."""
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr))\n"
        f"sys.argv = ['gradkeep', *{arguments!r}]\n"
        "from gradkeep.cli import main\n"
        "main()"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=100
    )
    return run.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["info", "--help"], ["sql", "-h"]]
)
def test_help_imports_nothing_heavy(tmp_path, arguments):
    assert loaded_after(arguments, tmp_path) == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ["info", "store"],
        ["verify", "store"],
        ["sql", "store", "select * from samples"],
        ["gc", "store"],
        ["delete", "store", "main/final/test/main", "--yes"],
    ],
)
def test_no_command_on_stores_imports_torch(folder, arguments):
    loaded = loaded_after(arguments, folder.parent)
    assert "torch" not in loaded
    if arguments[0] in ("info", "verify"):
        assert loaded == "['numpy']"


def test_help_is_quick(gradkeep):
    gradkeep("--help")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert gradkeep("--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < 1.0  # about 0.2 when nothing else runs


def test_help_lists_the_commands_and_version_is_the_packages(gradkeep):
    run = gradkeep("--help")
    for name in ("info", "verify", "sql", "gc", "delete"):
        assert f" {name} " in run.stdout
    assert gradkeep("--version").stdout == f"gradkeep {gk.__version__}\n"
    assert gradkeep().returncode == 2
    assert "No such command" in gradkeep("inof").stderr


def test_every_command_has_help(gradkeep):
    from gradkeep.cli._app import COMMANDS

    for command in COMMANDS:
        function = command.load()
        assert function.__doc__
        assert function.__name__ == command.name.replace("-", "_")


def test_a_reader_that_leaves_early_hears_nothing(folder):
    many = "select * from range(200000)"
    with subprocess.Popen(
        [sys.executable, "-m", "gradkeep", "sql", "store", many],
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(100) == 141


@pytest.mark.parametrize("moment", ["loading", "running"])
def test_an_interrupt_is_quiet(folder, moment):
    endless = "select count(*) from range(1000000000) a, range(1000000) b"
    with subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "gradkeep", "sql", "store", endless],
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests in the background has them ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        last = "typer" if moment == "loading" else "duckdb._version"
        for line in process.stderr:
            if line.rstrip().endswith(f" {last}"):
                break
        if moment == "running":
            time.sleep(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err


def test_verify_shows_a_bar_on_a_terminal(folder):
    main, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "gradkeep", "verify", "store"],
        cwd=folder.parent,
        stdin=side,
        stdout=side,
        stderr=side,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(side)
    shown = b""
    while process.poll() is None or select.select([main], [], [], 0)[0]:
        if select.select([main], [], [], 0.1)[0]:
            try:
                shown += os.read(main, 65536)
            except OSError:  # Linux says so at the end of a terminal
                break
    os.close(main)
    text = shown.decode()
    assert process.wait(100) == 0
    assert "━" in text
    assert "files" in text
    assert "healthy: " in text


def test_a_store_that_may_only_be_read_is_shown_checked_and_queried(folder):
    for parquet in folder.rglob("*.parquet"):
        parquet.unlink()
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}

    def frozen(*arguments):
        # Permissions do not bind an administrator: a filesystem that says no binds everybody.
        code = (
            "import sys, os, errno\n"
            "from gradkeep.store.backends._disk import Syscalls\n"
            "def no(*_): raise OSError(errno.EROFS, os.strerror(errno.EROFS))\n"
            "Syscalls.create = Syscalls.make_folder = Syscalls.unlink = Syscalls.rename = no\n"
            f"sys.argv = ['gradkeep', *{arguments!r}]\n"
            "from gradkeep.cli import main\n"
            "main()"
        )
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder.parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )

    for arguments in (["info"], ["verify"], ["sql", "select * from samples"], ["gc", "--dry-run"]):
        run = frozen(arguments[0], "store", *arguments[1:])
        assert (run.returncode, run.stderr) == (0, "")
    refused = frozen("delete", "store", "scores/dot", "--yes")
    assert refused.returncode == 2
    assert "not writable" in refused.stderr
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before


def test_serve_answers_until_it_is_interrupted_and_report_writes_one_file(
    gradkeep, folder, tmp_path
):
    line = [sys.executable, "-m", "gradkeep", "serve", str(folder), "--port", "0", "--no-open"]
    server = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        url = re.search(r"http://127\.0\.0\.1:\d+/", server.stdout.readline())[0]
        for path, part in (
            ("", b"gradkeep"),
            ("api/runs", b'"main"'),
            ("static/app.js", b"render"),
        ):
            with urllib.request.urlopen(url + path, timeout=30) as result:
                assert part in result.read()
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(20) in (0, 130)
        server.stdout.close()
    done = gradkeep("report", folder, "--out", tmp_path / "seen.html")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "seen.html").read_text()
    assert "gradkeep-answers" in text
    assert "http://" not in re.sub(r"http://www\.w3\.org|http://www\.apache\.org\S*", "", text)
    refused = gradkeep("serve", folder, "--host", "0.0.0.0", "--port", "0")
    assert (refused.returncode, "--allow-remote" in refused.stderr) == (2, True)
    assert gradkeep("serve", tmp_path / "nowhere", "--port", "0").returncode == 2
    assert gradkeep("serve", folder, "--data", "os:getcwd", "--port", "0").returncode == 2

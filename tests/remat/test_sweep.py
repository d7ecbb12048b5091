"""Sweeps, their tables and pictures, and the commands around them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from raises import raises

from gradkeep._budgets import parse_bytes
from gradkeep.errors import BudgetError, RematError
from gradkeep.remat.simulator import _plots, _sweep
from gradkeep.remat.simulator._plots import FigureStyle, draw_sweep, summarize_sweep
from gradkeep.remat.simulator._sweep import (
    SweepCase,
    find_logs,
    read_table,
    run_case,
    sweep,
    sweep_cases,
)

LOG = Path(__file__).parent / "data" / "cnn-alias.log"


def gradkeep(*words):
    return subprocess.run(
        [sys.executable, "-m", "gradkeep", *map(str, words)], capture_output=True, text=True
    )


def test_a_sweep_does_every_case_once_and_resumes(tmp_path, monkeypatch):
    table = tmp_path / "out" / "table.csv"
    cases = sweep_cases([LOG], heuristics=("dtr-eq", "lru"), ratios=(0.9, 0.6))
    rows = sweep(cases[:2], table, workers=1)
    assert [row.case for row in rows] == cases[:2]
    with table.open("a") as file:
        file.write("cut off,by a ki")
    second_rows = sweep(cases, table, workers=2)
    assert [row.case for row in second_rows] == cases
    assert second_rows[:2] == rows
    assert read_table(table) == second_rows
    monkeypatch.setattr(_sweep, "ProcessPoolExecutor", None)  # nothing is left to run
    assert sweep(cases, table) == second_rows


def test_fewer_ratios_leave_earlier_rows_in_the_table(tmp_path):
    table = tmp_path / "table.csv"
    every = sweep_cases([LOG], heuristics=("lru",), ratios=(0.9, 0.8, 0.7))
    sweep(every, table, workers=1)
    fewer = sweep_cases([LOG], heuristics=("lru",), ratios=(0.8,))
    assert [row.case for row in sweep(fewer, table, workers=1)] == fewer
    assert {row.case for row in read_table(table)} == set(every)


def test_the_page_names_a_command_that_records(tmp_path):
    page = Path(_sweep.__file__).parents[2] / "web" / "static" / "memory.js"
    command = page.read_text().split('"gradkeep remat record ')[1].split('"')[0]
    (tmp_path / "train.py").write_text("import torch\ndef step():\n    torch.ones(9) * 2\n")
    words = [str(tmp_path / "train.py"), "--log", str(tmp_path / "step.log")]
    assert [Path(word).name for word in words] == command.split()
    done = gradkeep("remat", "record", *words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "step.log").is_file()


def test_a_row_is_the_simulation():
    row = run_case(SweepCase(str(LOG), "dtr", 0.65, limit=3.0))
    assert row.status in ("ok", "oom", "thrash")
    assert row.peak <= row.budget


def test_bad_sweeps_are_refused_before_anything_runs():
    with raises(RematError, "remat.unknown_heuristic", fix="dtr"):
        sweep_cases([LOG], heuristics=("dtrr",))
    with raises(RematError, "argument.invalid") as caught:
        sweep_cases([LOG], ratios=(0.0,))
    assert caught.value.message.startswith("ratios must be above 0")


def test_pictures_are_written_and_the_same_each_time(tmp_path):
    rows = [run_case(case) for case in sweep_cases([LOG], heuristics=("dtr-eq", "lru"))]
    for folder in ("one", "two"):
        paths = draw_sweep(rows, tmp_path / folder, "pareto", FigureStyle("A title <with> signs"))
        assert [path.suffix for path in paths] == [".png", ".svg", ".html"]
    one, two = (tmp_path / folder / "pareto.svg" for folder in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    page = (tmp_path / "one" / "pareto.html").read_text()
    assert "A title &lt;with&gt; signs" in page
    assert "<svg" in page
    assert "http-equiv" not in page
    assert "<script" not in page
    assert summarize_sweep(rows)[0].startswith("At 50% of its memory")


@pytest.mark.parametrize(
    ("text", "count"), [("2GiB", 2**31), ("500 MB", 500_000_000), ("12", 12), ("1e3kb", 10**6)]
)
def test_budgets_as_people_write_them(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "two", "-1", "5 apples", "1.2.3"])
def test_budgets_that_are_none(text):
    with raises(BudgetError, "budget.not_bytes"):
        parse_bytes(text)


def test_simulate_command_has_the_promised_keys():
    done = gradkeep("remat", "simulate", LOG, "--ratio", "0.9", "--heuristic", "dtr-eq", "--json")
    assert done.returncode == 0, done.stderr
    fields = json.loads(done.stdout)
    keys = (
        "status overhead peak budget evictions rematerializations heuristic_evaluations accesses "
        "compute base_compute"
    )
    assert set(keys.split()) <= set(fields)
    assert fields["status"] == "ok"


def test_simulate_command_tells_of_failure_by_exit_code():
    done = gradkeep("remat", "simulate", LOG, "--budget", "1kB")
    assert done.returncode == 3
    assert "runs out of memory" in done.stdout
    assert "no budget below" in done.stdout


def test_a_fraction_is_a_budget_too_and_a_ratio_is_the_same_fraction():
    budgets = [
        json.loads(gradkeep("remat", "simulate", LOG, *words, "--json").stdout)
        for words in (("--budget", "0.9"), ("--ratio", "0.9"))
    ]
    assert budgets[0] == budgets[1]
    assert budgets[0]["ratio"] == pytest.approx(0.9, abs=1e-3)
    by_bytes = gradkeep("remat", "simulate", LOG, "--budget", budgets[0]["budget"], "--json")
    assert json.loads(by_bytes.stdout) == budgets[0]
    both = gradkeep("remat", "simulate", LOG, "--ratio", "0.9", "--budget", "0.9")
    assert (both.returncode, "either --ratio or --budget" in both.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["simulate", LOG], "either --ratio or --budget"),
        (["simulate", LOG, "--ratio", "0.5", "--heuristic", "dtrx"], "Did you mean dtr"),
        (["simulate", LOG, "--ratio", "0.5", "--policy", "never"], "policy must be"),
        (["simulate", LOG, "--ratio", "-1"], "'--ratio': Input should be greater than or equal"),
        (["simulate", LOG, "--budget", "lots"], "not a number of bytes"),
        (["simulate", "nowhere.log", "--ratio", "0.5"], "no such file"),
        (["pareto", LOG, "--ratios", "a,b"], "comma-separated"),
        (["optimal", LOG, "--budget", "1"], "at least"),
        (["record", "nowhere.py"], "there is no such file"),
    ],
)
def test_bad_command_lines_get_a_message_and_no_traceback(words, message, tmp_path):
    done = gradkeep("remat", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_pareto_command_writes_its_files(tmp_path):
    done = gradkeep(
        *("remat", "pareto", LOG, "--out", tmp_path, "--ratios", "0.9,0.5"),
        *("--heuristics", "dtr-eq,lru", "--json"),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 4
    names = {path.name for path in tmp_path.iterdir()}
    assert {"pareto.csv", "pareto.png", "pareto.svg", "pareto.html"} <= names


@pytest.mark.parametrize("figure", ["ablate", "accesses", "banish"])
def test_the_other_figures(figure, tmp_path):
    done = gradkeep("remat", figure, LOG, "--out", tmp_path, "--ratios", "0.8")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"{figure}.png").stat().st_size > 10_000


def test_record_command_records_a_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "net = torch.nn.Linear(4, 4)\n"
        "def step():\n"
        "    net.zero_grad(set_to_none=True)\n"
        "    net(torch.ones(2, 4)).sum().backward()\n"
    )
    log = tmp_path / "step.log"
    done = gradkeep("remat", "record", script, "--log", log, "--json")
    assert done.returncode == 0, done.stderr
    fields = json.loads(done.stdout)
    assert fields["peak"] == fields["live_peak"]
    assert gradkeep("remat", "simulate", log, "--ratio", "1.0").returncode == 0
    wrong = gradkeep("remat", "record", script, "--function", "train")
    assert wrong.returncode == 2
    assert "--function" in wrong.stderr


def test_the_commands_do_without_torch():
    code = (
        "import sys; from gradkeep.cli import _remat, _remat_figures; "
        "import gradkeep.remat, gradkeep.compat.dtr.experiments; print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_figures_command_draws_all_figures_of_a_folder(tmp_path):
    logs, out = tmp_path / "logs", tmp_path / "figures"
    logs.mkdir()
    (logs / "cnn-1.log").write_bytes(LOG.read_bytes())
    words = ("remat", "figures", logs, "--out", out, "--ratios", "0.9,0.6", "--workers", "1")
    done = gradkeep(*words, "--json")
    assert done.returncode == 0, done.stderr
    figures = [
        *("pareto", "banishing", "accesses"),
        *(f"ablation-{part}" for part in ("exact", "eq", "local", "none")),
    ]
    for name in figures:
        assert (out / f"{name}.png").stat().st_size > 10_000
    rows = read_table(out / "figures.csv")
    assert json.loads(done.stdout)["rows"] == len(rows) == 2 * (6 + 10 + 11 + 2)
    by = {(row.heuristic, row.policy, row.releases): row for row in rows}
    assert {(h, p, r) for h, p, r in by if p == "banish" or not r} == {
        ("dtr-union", "banish", True),
        ("dtr", "eager", False),
    }
    assert all(row.accesses for row in rows)
    assert {row.seed for row in rows if row.heuristic == "random"} == set(range(10))
    assert [row.case for row in rows] == list(dict.fromkeys(row.case for row in rows))


def test_random_is_drawn_as_mean_and_range_where_all_seeds_ran():
    cases = sweep_cases([LOG], heuristics=("random",), ratios=(0.9, 0.6))
    rows = [run_case(case) for case in cases]
    (axis,) = _plots._figure(rows, FigureStyle("Title")).axes
    each = [row.overhead for row in rows if row.ratio == 0.9]
    assert list(axis.lines[0].get_xdata()) == [0.9]
    assert axis.lines[0].get_ydata() == pytest.approx(sum(each) / 10)
    low, high = axis.collections[0].get_paths()[0].get_extents().intervaly
    assert (low, high) == pytest.approx((min(each), max(each)))


def test_manifests_name_logs_and_their_titles(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "a-1.log").write_bytes(LOG.read_bytes())
    (logs / "b-1.log").write_bytes(LOG.read_bytes())
    assert [log.title for log in find_logs([logs])[0]] == ["a", "b"]
    entries = [
        {"name": "A (1)", "title": "A", "desc": "x", "log": "logs/a-1.log", "has_start": True},
        {"name": "C", "title": "C", "desc": "x", "log": "logs/c.log", "has_start": True},
    ]
    for content in ({"models": entries}, {"a": entries[:1], "c": entries[1:]}):
        (logs / "manifest.json").write_text(json.dumps(content))
        for place in (logs, logs / "manifest.json"):
            titled_logs, notes = find_logs([place])
            assert [(log.title, log.path.name) for log in titled_logs] == [("A", "a-1.log")]
            assert "'C' is skipped" in notes[0]


@pytest.mark.parametrize(
    ("content", "reason", "details"),
    [
        ("[", "manifest_invalid", ""),
        ("[1]", "manifest_invalid", ""),
        ('{"models": [{"name": "a"}]}', "manifest_invalid", "log"),
        (
            '{"models": [{"name": "a", "log": "a.log", "has_start": false}]}',
            "manifest_invalid",
            "has_start",
        ),
        ('{"models": [{"name": "a", "log": "a.log"}]}', "logs_missing", "a.log"),
    ],
)
def test_bad_manifests_are_refused_with_what_is_wrong(content, reason, details, tmp_path):
    (tmp_path / "manifest.json").write_text(content)
    with raises(RematError, f"remat.{reason}") as caught:
        find_logs([tmp_path])
    assert details in caught.value.found
    with raises(RematError, "remat.log_not_found"):
        find_logs([tmp_path / "nowhere"])

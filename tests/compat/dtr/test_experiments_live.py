"""Trials on live models: trained for real in a budget, and drawn beside what was simulated."""

import csv
import json
import math
import subprocess
import sys

import pytest
import torch
from raises import raises

from gradkeep.cli._remat_figures import show_endings
from gradkeep.compat.dtr.experiments._config import pareto_experiment, parse_experiment
from gradkeep.compat.dtr.experiments._live import (
    make_log,
    measure_checkpoints,
    measure_online,
    measure_planned,
    place_checkpoints,
)
from gradkeep.compat.dtr.experiments._run import run_experiment
from gradkeep.compat.dtr.experiments._trial import TrialWork
from gradkeep.compat.dtr.zoo import build
from gradkeep.errors import RematError
from gradkeep.remat import chain, read_log, simulate, unlimited_peak
from gradkeep.remat.simulator._optimal import optimum_point
from gradkeep.remat.simulator._plots import FigureStyle, draw_sweep, summarize_sweep
from gradkeep.remat.simulator._sweep import SweepRow, read_table, sweep, write_table

SIZES = {"layers": 1, "batch_size": 8}


def gradkeep(*words):
    return subprocess.run(
        [sys.executable, "-m", "gradkeep", "remat", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.fixture(scope="module")
def pictured(tmp_path_factory):
    """A Pareto picture of a model that was really trained."""
    out = tmp_path_factory.mktemp("pareto")
    sizes = [word for name, value in SIZES.items() for word in ("--size", f"{name}={value}")]
    done = gradkeep(
        *("pareto", "--model", "lstm_encoder", *sizes, "--out", out, "--repeats", 2),
        *("--heuristics", "lru", "--ratios", "1.0", "--live-ratios", "0.8"),
        *("--placements", "all"),
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(path.read_text()) for path in (out / "trials/results").iterdir()]
    return out, done, {(r["type"], r.get("ratio")): r for r in results}


def test_live_trials_tell_time_and_bytes(pictured):
    _, _, results = pictured
    plain = results["baseline", None]
    for kind in ("dtr", "planned"):
        measured = results[kind, 0.8]
        assert measured["status"] == "ok"
        assert measured["unlimited_peak"] == plain["peak"]
        assert measured["peak"] <= measured["budget"] == int(0.8 * plain["peak"])
        assert measured["overhead"] > 0.5
        assert 0 < measured["least_time"] <= measured["time"]
        assert min(measured[f"{part}_time"] for part in ("base", "remat", "search", "copy")) >= 0
        assert measured["remat_time"] > 0
    assert results["planned", 0.8]["floor"] <= results["planned", 0.8]["predicted_peak"]
    assert results["dtr", 0.8]["rematerializations"] > 0
    assert results["checkpoint", None]["peak"] < plain["peak"]


def test_one_picture_has_everything(pictured):
    out, done, _ = pictured
    rows = read_table(out / "pareto.csv")
    assert {row.source for row in rows} == {
        *("simulated", "optimum", "online", "planned", "checkpoint")
    }
    assert len({row.log for row in rows}) == 1
    drawing, page = (out / "pareto.svg").read_text(), (out / "pareto.html").read_text()
    for label in (
        "lru, simulated",
        "dtr-eq, online, measured",
        "planned, measured",
        "torch.utils.checkpoint, measured",
        "optimum, integer program",
    ):
        assert f"<!-- {label} -->" in drawing
        assert f"<!-- {label} -->" in page
    assert (out / "pareto.png").stat().st_size > 10_000
    assert "planned, measured" in done.stdout
    with (out / "trials/summary/lstm_encoder.csv").open(newline="") as file:
        table = {(row["type"], row["ratio"]): row for row in csv.DictReader(file)}
    planned = table["planned", "0.8"]
    assert float(planned["search_time"]) == float(planned["copy_time"]) == 0
    assert float(table["dtr", "0.8"]["copy_time"]) >= 0
    assert table["checkpoint", ""]["placement"] == "all"


def test_the_original_layout_trains_live_models_once(tmp_path):
    extra = {"in_dim": 4, "mem_dim": 8, "input_size": 3, "use_sampling": False}
    common = {"type": "dtr", "use_profiling": True, "memory_budget": 1e5, "extra_params": extra}
    config = {
        "active": True,
        "models": ["lstm"],
        "dry_run": 1,
        "n_reps": 2,
        "dtr_settings": {
            "default": {"batch_size": 32, "timeout": 100},
            "lstm": [
                {**common, "kind": "param_sweep", "batch_size": [5]},
                {**common, "kind": "fixed", "memory_budget": 9e4, "batch_size": 5, "timeout": 0.01},
            ],
        },
    }
    experiment = parse_experiment(config)
    report = run_experiment(experiment, tmp_path)
    swept, slow = report.results
    assert (swept["status"], swept["sizes"]["length"]) == ("ok", 5)
    assert (swept["sample"], swept["skip_small"]) == (False, True)
    assert swept["peak"] <= 1e5
    assert (slow["status"], report.failed) == ("timeout", 1)
    assert {path.name for path in report.files} == {"lstm.csv", "lstm-sweep.png", "lstm-sweep.svg"}
    assert run_experiment(experiment, tmp_path).ran == 0


# Without processes of their own


def plan_of(name, **sizes):
    return TrialWork(name, tuple(sizes.items()), repeats=1)


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


TINY = plan_of("lstm", length=4, in_dim=4, mem_dim=8)
WORDS = plan_of("lstm_encoder", **SIZES)
ASKED = {"heuristic": "dtr-eq", "sample": False, "skip_small": False}


def test_online_gives_up_beyond_its_limit():
    free = measure_online(TINY, math.inf, **ASKED, limit=10.0)
    assert (free["status"], free["budget"], free["rematerializations"]) == ("ok", None, 0)
    # The order of evictions by LRU does not depend on measured times.
    options = {**ASKED, "heuristic": "lru"}
    measured = measure_online(TINY, 0.85 * free["peak"], **options, limit=1.0)
    assert measured["status"] == "gave up"
    assert "1 times" in measured["message"]


def test_online_may_look_at_a_part_of_the_pool():
    options = {"heuristic": "lru", "sample": True, "skip_small": True}
    measured = measure_online(WORDS, 0.9 * 1123320, **options, limit=10.0)
    assert (measured["status"], measured["unlimited_peak"]) == ("ok", 1123320)
    assert measured["peak"] <= measured["budget"]
    assert measured["evictions"] > 0


def test_budgets_that_are_too_small_say_so_and_name_the_floor(capsys):
    planned = measure_planned(WORDS, 3e5)
    assert planned["status"] == "infeasible"
    assert f"the floor is {planned['floor']} bytes" in planned["message"]
    assert planned["budget"] < planned["floor"] < planned["unlimited_peak"]
    online = measure_online(WORDS, 3e5, **ASKED, limit=10.0)
    assert online["status"] == "over budget"
    assert online["peak"] > online["budget"]
    common = {"model": "words", "ratio": 0.3, "key": "k"}
    show_endings([{**common, "type": "planned", **planned}, {**common, "type": "dtr", **online}])
    error_output = capsys.readouterr().err
    assert f"words planned 0.3: infeasible: {planned['message']}" in error_output
    assert "words dtr 0.3: over budget" in error_output
    large = {**common, "type": "optimal", "status": "too large", "message": "so many"}
    show_endings([large, {**large, "ratio": 0.5}, {**common, "type": "simrd", "status": "oom"}])
    assert capsys.readouterr().err == "words optimal: too large: so many\n"


def test_live_trials_run_out_of_memory_where_the_simulator_does(tmp_path):
    log = tmp_path / "step.log"
    make_log(WORDS, log)
    program = read_log(log)
    assert simulate(program, budget=3e5).status == "oom"
    online = measure_online(WORDS, 3e5, **ASKED, limit=10.0)
    assert online["message"].startswith("out of memory")


def test_a_log_without_recomputation_runs_live_within_its_budget(tmp_path):
    resnet = plan_of("resnet20", batch_size=4, height=16, width=16)
    log = tmp_path / "step.log"
    make_log(resnet, log)
    program = read_log(log)
    peak = unlimited_peak(program)
    assert simulate(program, budget=peak).rematerializations == 0
    online = measure_online(resnet, peak, **ASKED, limit=10.0)
    assert online["status"] == "ok"
    assert online["peak"] <= peak


def test_checkpoints_go_where_they_are_told_and_away_again():
    work = build("resnet20", batch_size=2, height=8, width=8)
    rng = torch.get_rng_state()
    plain = work.step()
    for name in ("3 segments", "all", "odd"):
        torch.set_rng_state(rng)
        with place_checkpoints(work.model, name):
            assert torch.equal(work.step(), plain)
    assert not any("forward" in vars(module) for module in work.model.modules())


def test_fewer_bytes_with_checkpoints_than_without():
    wide = plan_of("resnet20", batch_size=8, height=16, width=16)
    measured = measure_checkpoints(wide, placement="4 segments")
    assert measured["status"] == "ok"
    assert measured["peak"] < 0.85 * measured["unlimited_peak"]


def test_places_that_a_model_does_not_have_are_no_failure():
    measured = measure_checkpoints(TINY, placement="2 segments")
    assert measured["status"] == "infeasible"
    assert "no such placement" in measured["message"]
    with raises(RematError, "compat.no_segments") as caught:
        place_checkpoints(torch.nn.Sequential(torch.nn.Linear(2, 2)), "99 segments").__enter__()
    assert "at least 99" in caught.value.expected


def test_optima_are_told_apart_from_guesses():
    program = chain(6, size=1, cost=1)
    free, tight = (optimum_point(program, room, time_limit=20) for room in (100, 5))
    assert (free.status, free.overhead) == ("ok", 1.0)
    assert tight.status == "ok"
    assert tight.overhead > 1
    assert tight.peak <= 5
    none, large = (
        optimum_point(program, 1, time_limit=1),
        optimum_point(chain(30, size=1, cost=1), 10, time_limit=1),
    )
    assert (none.status, none.overhead) == ("oom", None)
    assert "no schedule takes fewer" in none.message
    assert large.status == "too large"
    assert "60 operators" in large.message


def row(source, heuristic, ratio, overhead, status="ok"):
    return SweepRow("m.log", heuristic, ratio, "", 2.0, status, overhead, 5, 4, 0, 0, 0, 0, source)


def test_steep_pictures_are_logarithmic_and_tables_keep_everything(tmp_path):
    rows = [
        row("simulated", "lru", 0.5, 1.2),
        row("online", "lru", 0.5, 30.0),
        row("online", "lru", 0.3, 90.0, "gave up"),
        row("planned", "planned", 0.5, 1.1),
        row("planned", "planned", 0.3, math.nan, "infeasible"),
        row("checkpoint", "2 segments", 0.7, 1.3),
        row("optimum", "optimum", 0.5, 1.05),
        row("optimum", "optimum", 0.3, 1.5, "unproven"),
    ]
    _, drawing, page = draw_sweep(rows, tmp_path, "pareto", FigureStyle("Title"))
    assert "all results of an operator" in drawing.read_text()
    assert "<!-- 30 -->" in drawing.read_text(), "the axis says 30, not 3 x 10^1"
    assert "<td>infeasible</td>" in page.read_text()
    sentences = summarize_sweep(rows)
    assert "At 50% of its memory m.log takes 1.10x the time (planned, measured)." in sentences
    assert any("torch.utils.checkpoint, measured, 2 segments" in line for line in sentences)
    assert summarize_sweep([row("planned", "planned", 1.3, 1.0)]) == []
    table = tmp_path / "table.csv"
    write_table(table, rows)
    assert [repr(one) for one in read_table(table)] == [repr(one) for one in rows]
    assert sweep([], table) == [], "what was measured is not taken for a simulation"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--model NAME"),
        (["--model", "lsmt"], "lstm"),
        (["--model", "lstm", "--size", "length"], "NAME=VALUE"),
    ],
)
def test_bad_command_lines_get_a_message_and_no_traceback(words, message, tmp_path):
    done = gradkeep("pareto", *words, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"sizes": {"length": "long"}}, "compat.size_type"),
        ({"placements": ["everywhere"]}, "compat.unknown_placement"),
        ({"live_heuristics": ["dtrr"]}, "remat.unknown_heuristic"),
        ({"live_ratios": [0]}, "compat.invalid_field"),
        ({"live_ratios": []}, "compat.empty_list"),
    ],
)
def test_bad_questions_about_a_model_are_refused_before_anything_runs(wrong, code):
    options = {"sizes": {}, "heuristics": ["lru"], "ratios": [0.5], **wrong}
    with raises(RematError, code):
        pareto_experiment(["lstm"], **options)

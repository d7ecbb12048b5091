"""Experiments by configuration: what is asked for is run, once, and put in tables."""

import csv
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from raises import raises

from gradkeep.compat.dtr.experiments._config import parse_experiment, read_experiment
from gradkeep.compat.dtr.experiments._run import run_experiment
from gradkeep.compat.dtr.experiments._tables import batch_size_lines, write_graphs
from gradkeep.errors import RematError
from gradkeep.remat import read_log, simulate, unlimited_peak
from gradkeep.remat.simulator._sweep import find_logs

SMALL = {"length": 6, "in_dim": 4, "mem_dim": 8}


def gradkeep(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "gradkeep", "remat", "experiments", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        **options,
    )


def parse(commands, model="lstm", **top):
    return parse_experiment({"models": {model: commands}, **top})


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# Configurations


def test_lists_unfold_into_all_combinations_and_nothing_runs_twice():
    command = {
        "type": "dtr",
        "memory_budget": [1e5, 2e5],
        "heuristic": ["lru", "msps"],
        "batch_size": [1, 2, 3],
        "extra_params": SMALL,
    }
    trials = parse([command, command]).trials
    combinations = {(t.budget, t.heuristic, dict(t.work.sizes)["batch_size"]) for t in trials}
    assert len(trials) == len(combinations) == 12
    assert {t.kind for t in trials} == {"fixed"}
    assert all(dict(t.work.sizes)["mem_dim"] == 8 for t in trials)


def test_each_input_is_its_own_trial():
    trials = parse([{"type": "baseline"}], n_inputs=3, seed=5, n_reps=2, dry_run=0).trials
    assert [trial.work.seed for trial in trials] == [5, 6, 7]
    assert {(t.work.repeats, t.work.warmup) for t in trials} == {(2, 0)}
    assert len({trial.key for trial in trials}) == 3


def test_defaults_hold_until_a_command_says_otherwise():
    commands = [{"type": "baseline"}, {"type": "baseline", "batch_size": 3, "timeout": 7}]
    one, two = parse(commands, default={"batch_size": 2, "timeout": 5}).trials
    assert (dict(one.work.sizes)["batch_size"], one.timeout) == (2, 5)
    assert (dict(two.work.sizes)["batch_size"], two.timeout) == (3, 7)


def test_a_budget_of_minus_one_is_no_budget_and_units_are_read():
    trials = parse([{"type": "simrd", "memory_budget": [-1, "2MiB", "5e4", 9e9]}]).trials
    assert [trial.budget for trial in trials] == [math.inf, 2**21, 5e4, 9e9]


def test_retries_need_to_be_switched_on():
    extra = {**SMALL, "retry_on_error": True, "max_retries": 4}
    commands = [
        {"type": "dtr", "ratio": 0.5, "max_retries": 4},
        {"type": "dtr", "ratio": 0.4, "extra_params": extra},
        {"type": "dtr", "ratio": 0.3, "retry_on_error": True},
    ]
    assert [trial.retries for trial in parse(commands).trials] == [0, 4, 10]


def test_the_original_layout_is_read_with_its_names_sizes_and_meanings():
    config = {
        "active": True,
        "save_logs": False,
        "log_dest": "~/logs",
        "sync_gpu": True,
        "dtr_torch_cmd": "python3",
        "dry_run": 2,
        "n_inputs": 1,
        "n_reps": 4,
        "notify": [],
        "models": ["tv_densenet121", "treelstm", "lstm", "transformer", "unroll_gan"],
        "dtr_settings": {
            "default": {"batch_size": 32, "timeout": 1200, "use_sampling": True},
            "tv_densenet121": [{"type": "baseline", "extra_params": {"height": 64, "width": 64}}],
            "treelstm": [
                {
                    "type": "dtr",
                    "kind": "fixed",
                    "memory_budget": [8.0e9, 2.0e9],
                    "batch_size": 9,
                    "use_profiling": True,
                    "use_sampling": False,
                    "extra_params": {"in_dim": 100, "mem_dim": 300, "input_size": 640},
                }
            ],
            "lstm": [{"type": "baseline", "batch_size": 256, "extra_params": {"input_size": 512}}],
            "transformer": [
                {"type": "baseline", "batch_size": 10, "extra_params": {"input_seq_length": 256}}
            ],
            "unroll_gan": [{"type": "baseline", "extra_params": {"d_hid": 7, "g_inp": 9}}],
            "resnet32": [{"type": "not run, so not read"}],
        },
    }
    experiment = parse_experiment(config)
    dense, tree, _, lstm, transformer, gan = experiment.trials
    sizes = [dict(trial.work.sizes) for trial in (dense, tree, lstm, transformer, gan)]
    assert (dense.work.name, dense.timeout, dense.work.repeats) == ("densenet121", 1200, 4)
    assert sizes[0] == {"batch_size": 32, "classes": 1000, "height": 64, "width": 64}
    assert (sizes[1]["depth"], sizes[1]["batch_size"], sizes[1]["mem_dim"]) == (9, 640, 300)
    assert (sizes[2]["length"], sizes[2]["batch_size"]) == (256, 512)
    assert (sizes[3]["length"], sizes[3]["layers"], sizes[3]["batch_size"]) == (256, 12, 10)
    assert (gan.work.name, sizes[4]["d_hidden"], sizes[4]["noise_dim"]) == ("unrolled_gan", 7, 9)
    assert any("sync_gpu has no effect" in note for note in experiment.notes)
    assert (tree.sample, tree.skip_small) == (False, True), "the original's habits, unless told"


def test_sampling_is_for_budgets_that_are_wide_enough():
    extra = {"no_sampling_below_ratio": 0.5, "no_sampling_below_budget": 1e5, "use_sampling": True}
    ratios = {"type": "dtr", "ratio": [0.6, 0.5], "extra_params": extra}
    budgets = {"type": "dtr", "memory_budget": [2e5, 1e5], "extra_params": extra}
    settings = {"default": {"use_sampling": False}}
    experiment = parse([ratios, budgets, {"type": "dtr", "ratio": 0.7}], **settings)
    assert [trial.sample for trial in experiment.trials] == [True, False, True, False, False]
    assert not any(trial.skip_small for trial in experiment.trials)
    assert not experiment.notes


def test_unknown_keys_are_told_but_not_fatal():
    commands = [{"type": "baseline", "batchsize": 3, "extra_params": {"colour": 3}}]
    experiment = parse(commands, retries=4)
    assert len(experiment.trials) == 1
    assert "'retries' is unknown and ignored" in experiment.notes
    assert any("command 1: 'batchsize'" in n and "batch_size" in n for n in experiment.notes)
    assert any("no size 'colour'" in note for note in experiment.notes)


def test_inactive_configurations_run_nothing():
    experiment = parse([{"type": "baseline"}], active=False)
    assert experiment.trials == ()
    assert experiment.notes


@pytest.mark.parametrize(
    ("model", "command", "words"),
    [
        ("lsmt", {"type": "baseline"}, ["lsmt", "lstm"]),
        ("lstm", {"ratio": 0.5}, ["command 2", "type", "baseline, simrd, optimal, dtr"]),
        ("lstm", {"type": "dtrr", "ratio": 1}, ["command 2", "type", "'dtrr'", "dtr"]),
        ("lstm", {"type": "dtr"}, ["command 2", "memory_budget"]),
        ("lstm", {"type": "dtr", "kind": "ratio"}, ["command 2", "ratio is missing"]),
        ("lstm", {"type": "dtr", "kind": "use_log"}, ["command 2", "kind", "param_sweep"]),
        ("lstm", {"type": "dtr", "ratio": 0}, ["command 2", "ratio", "> 0"]),
        ("lstm", {"type": "dtr", "ratio": [0.5, "half"]}, ["command 2", "ratio", "'half'"]),
        ("lstm", {"type": "dtr", "ratio": []}, ["command 2", "ratio", "empty"]),
        ("lstm", {"type": "dtr", "memory_budget": "2 houses"}, ["memory_budget", "2GiB"]),
        ("lstm", {"type": "dtr", "memory_budget": 0}, ["memory_budget", "above 0"]),
        ("lstm", {"type": "dtr", "memory_budget": True}, ["memory_budget", "True"]),
        ("lstm", {"type": "dtr", "ratio": 1, "heuristic": "dtr-eg"}, ["heuristic", "dtr-eq"]),
        ("lstm", {"type": "dtr", "ratio": 1, "policy": "lazy"}, ["policy", "eager"]),
        ("lstm", {"type": "dtr", "ratio": 1, "policy": "banish"}, ["policy", "eager", "simrd"]),
        ("lstm", {"type": "dtr", "ratio": 1, "use_sampling": 3}, ["use_sampling", "bool"]),
        ("lstm", {"type": "planned"}, ["command 2", "memory_budget"]),
        ("lstm", {"type": "planned", "kind": "ratio"}, ["command 2", "ratio is missing"]),
        ("lstm", {"type": "planned", "ratio": 0.5, "kind": "any"}, ["command 2", "kind", "fixed"]),
        ("lstm", {"type": "optimal", "ratio": 0.5, "time_limit": 0}, ["time_limit", "> 0"]),
        ("lstm", {"type": "checkpoint", "placement": "all over"}, ["placement", "2 segments"]),
        ("lstm", {"type": "checkpoint", "placement": 3}, ["placement", "str"]),
        ("lstm", {"type": "dtr", "ratio": 1, "limit": 0.5}, ["limit", ">= 1"]),
        ("lstm", {"type": "baseline", "batch_size": 0}, ["command 2", "batch_size"]),
        ("lstm", {"type": "baseline", "batch_size": "many"}, ["command 2", "batch_size"]),
        ("lstm", {"type": "baseline", "timeout": -1}, ["command 2", "timeout"]),
        ("lstm", {"type": "baseline", "n_reps": 1.5}, ["command 2", "n_reps", "int"]),
        ("lstm", {"type": "baseline", "retry_on_error": 3}, ["retry_on_error", "bool"]),
        ("lstm", {"type": "baseline", "extra_params": 3}, ["command 2", "extra_params"]),
        (
            "lstm",
            {"type": "baseline", "extra_params": {"length": [1, 2]}},
            ["extra_params.length", "not expanded"],
        ),
        ("lstm", "baseline", ["command 2", "mapping"]),
    ],
)
def test_mistakes_are_told_with_their_place(model, command, words):
    with pytest.raises(RematError) as caught:
        parse([{"type": "baseline"}, command], model=model)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "code"),
    [("[]", "config.not_a_mapping"), ("{", "config.syntax"), ("[" * 99999, "config.syntax")],
)
def test_files_that_hold_no_mapping_are_refused(tmp_path, text, code):
    (tmp_path / "config.yaml").write_text(text)
    with raises(RematError, code):
        read_experiment(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("config", "reason", "words"),
    [
        ({}, "no_models", "models"),
        ({"models": ["lstm"]}, "no_settings", "dtr_settings"),
        (
            {"models": ["lstm"], "dtr_settings": {"lsmt": [{"type": "baseline"}]}},
            "no_settings",
            "lsmt",
        ),
        ({"models": {"lstm": {}}}, "no_commands", "lstm"),
        (
            {"models": {"lstm": [{"type": "baseline"}]}, "sizes": "huge"},
            "unknown_sizes",
            "published",
        ),
        (
            {"models": {"lstm": [{"type": "baseline"}]}, "default": 3},
            "default_not_a_mapping",
            "default",
        ),
    ],
)
def test_configurations_of_another_form_are_refused(config, reason, words):
    with raises(RematError, f"compat.{reason}") as caught:
        parse_experiment(config)
    assert words in str(caught.value)


def test_yaml_reads_as_json_does_although_it_takes_exponents_for_text(tmp_path):
    text = "models:\n  lstm:\n    - {type: dtr, memory_budget: [5e4, 2GiB], limit: 5e1}\n"
    (tmp_path / "a.yaml").write_text(text)
    budgets = ["5e4", "2GiB"]
    config = {"models": {"lstm": [{"type": "dtr", "memory_budget": budgets, "limit": 50}]}}
    (tmp_path / "a.json").write_text(json.dumps(config))
    experiment = read_experiment(tmp_path / "a.yaml")
    assert experiment == read_experiment(tmp_path / "a.json")
    assert experiment.trials[0].budget == 5e4


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "{models: 3}"),
        ("a.yaml", "models: [\n"),
        ("a.json", '{"models": {"lstm": [{"type": "dtr", "memory_budget": {}}]}}'),
        ("missing.json", None),
    ],
)
def test_the_command_refuses_bad_files_with_exit_code_2_and_no_traceback(tmp_path, name, text):
    if text is not None:
        (tmp_path / name).write_text(text)
    run = gradkeep(tmp_path / name, "--out", tmp_path / "out")
    assert run.returncode == 2
    assert str(tmp_path / name) in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "out").exists()


# Runs


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An experiment that ran to its end."""
    folder = tmp_path_factory.mktemp("experiment")
    command = {
        "type": "simrd",
        "kind": "ratio",
        "ratio": [0.9, 0.8],
        "heuristic": ["dtr-eq", "lru"],
        "extra_params": SMALL,
    }
    fixed = {"type": "simrd", "memory_budget": -1, "extra_params": SMALL}
    config = {"models": {"lstm": [command, fixed]}, "n_reps": 2}
    (folder / "config.json").write_text(json.dumps(config))
    run = gradkeep(folder / "config.json", "--out", folder / "out", "--json", "--workers", 2)
    return folder, run


def test_every_trial_says_what_simulating_the_recorded_step_says(finished):
    folder, run = finished
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    (log,) = (folder / "out" / "logs").glob("*.log")
    program = read_log(log)
    peak = unlimited_peak(program)
    assert (report["trials"], report["ran"], report["reused"], report["failed"]) == (6, 6, 0, 0)
    for result in report["results"]:
        if result["type"] == "baseline":
            assert result["peak"] == peak
            assert 0 < result["least_time"] <= result["time"]
            continue
        budget = math.inf if result["ratio"] is None else int(result["ratio"] * peak)
        expected = simulate(program, heuristic=result["heuristic"], budget=budget, limit=10.0)
        assert result["status"] == expected.status
        assert result["overhead"] == expected.overhead
        assert result["evictions"] == expected.evictions
        assert result["unlimited_peak"] == peak


def test_there_is_a_table_and_a_picture_per_model(finished):
    folder, _ = finished
    rows = table(folder / "out" / "summary" / "lstm.csv")
    assert [row["type"] for row in rows] == ["simrd"] * 5 + ["baseline"]
    assert {row["ratio"] for row in rows[:4]} == {"0.9", "0.8"}
    assert all(row["status"] in ("ok", "oom", "thrash") for row in rows)
    names = {path.name for path in (folder / "out" / "graphs").iterdir()}
    assert names == {"lstm.png", "lstm.svg", "lstm.html"}
    assert "lstm, batch 8" in (folder / "out" / "graphs" / "lstm.html").read_text()


def test_a_rerun_only_runs_what_is_missing(finished):
    folder, _ = finished
    results = sorted((folder / "out" / "results").iterdir())
    assert len(results) == 6
    gone = next(path for path in results if path.name.startswith("simrd"))
    before = {path: path.stat().st_mtime_ns for path in results if path != gone}
    old = json.loads(gone.read_text())
    gone.write_text(gone.read_text()[:20])  # cut off: as good as missing
    report = run_experiment(read_experiment(folder / "config.json"), folder / "out")
    assert (report.ran, report.reused) == (1, 5)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    new = json.loads(gone.read_text())
    assert new["overhead"] == old["overhead"], "the recorded step was not recorded again"


def test_a_sweep_has_a_picture_of_its_own(tmp_path):
    common = {"model": "lstm", "sizes": {"batch_size": 4}, "seed": 0, "status": "ok", "key": "k"}
    swept = {"heuristic": "lru", "policy": "eager", "limit": 10, "ratio": None, "budget": 9000}
    rows = [
        {**common, "type": "baseline", "kind": "fixed", "batch_size": 4, "time": 0.5},
        {**common, **swept, "type": "simrd", "kind": "param_sweep", "batch_size": 8, "time": 2.0},
        {**common, **swept, "type": "simrd", "kind": "param_sweep", "batch_size": 4, "time": 0.8},
        {
            **common,
            **swept,
            "type": "simrd",
            "kind": "param_sweep",
            "batch_size": 16,
            "status": "oom",
            "time": 0.1,
        },
        {**common, **swept, "type": "dtr", "kind": "param_sweep", "batch_size": 4, "time": 2.0},
        {**common, **swept, "type": "planned", "kind": "param_sweep", "batch_size": 4, "time": 1.0},
    ]
    assert batch_size_lines(rows) == {
        "plain, measured": [(4, 8.0)],
        "lru in 9.00 kB, simulated": [(4, 5.0), (8, 4.0)],
        "lru in 9.00 kB, online, measured": [(4, 2.0)],
        "planned in 9.00 kB, measured": [(4, 4.0)],
    }
    paths, notes = write_graphs(rows, tmp_path)
    assert sorted(path.name for path in paths) == ["lstm-sweep.png", "lstm-sweep.svg"]
    assert not notes
    assert all(path.stat().st_size > 1000 for path in paths)


def test_failures_are_results_after_as_many_retries_as_allowed(tmp_path):
    extra = {"dim": 30, "retry_on_error": True, "max_retries": 1}
    config = {
        "models": {
            "transformer": [{"type": "baseline", "extra_params": extra}],
            "resnet1202": [{"type": "simrd", "memory_budget": 1e6, "timeout": 0.3}],
        }
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = gradkeep(tmp_path / "config.json", "--out", tmp_path / "out", "--json")
    assert run.returncode == 3, run.stderr
    broken, slow = json.loads(run.stdout)["results"]
    assert (broken["status"], broken["retries"]) == ("error", 1)
    assert "not a multiple of heads" in broken["message"]
    assert slow["status"] == "timeout"
    assert "recording" in slow["message"]
    assert "longer than 0.3 s" in slow["message"]
    assert "2 failed" in run.stderr
    assert table(tmp_path / "out" / "summary" / "transformer.csv")[0]["status"] == "error"
    # The one that has a result is left alone unless told otherwise.
    experiment = parse([{"type": "baseline", "extra_params": {"dim": 30}}], model="transformer")
    assert run_experiment(experiment, tmp_path / "out").ran == 0
    assert run_experiment(experiment, tmp_path / "out", retry_failed=True).ran == 1
    strict = dataclasses.replace(experiment, report_errors=False)
    with raises(RematError, "compat.trial_failed", fix="report_errors"):
        run_experiment(strict, tmp_path / "other")


def started(folder, config):
    """An experiment that runs on beside the test."""
    (folder / "config.json").write_text(json.dumps(config))
    line = [sys.executable, "-m", "gradkeep", "remat", "experiments", folder / "config.json"]
    return subprocess.Popen(
        [*map(str, line), "--out", str(folder / "out")], stderr=subprocess.DEVNULL
    )


def wait_for(happened):
    for _ in range(600):
        if result := happened():
            return result
        time.sleep(0.1)
    return happened()


def _ratios(paths):
    return [json.loads(path.read_text())["ratio"] for path in paths]


def test_a_kill_loses_nothing_done(tmp_path):
    ratios = [0.99 - 0.001 * step for step in range(600)]
    command = {"type": "simrd", "ratio": ratios, "heuristic": "lru", "extra_params": SMALL}
    out = tmp_path / "out"
    running = started(tmp_path, {"models": {"lstm": [command]}})
    wait_for(lambda: len(list((out / "results").glob("simrd*.json"))) >= 3)
    running.send_signal(signal.SIGKILL)
    running.wait()
    done = sorted((out / "results").glob("simrd*.json"))
    assert 3 <= len(done) < 600
    before = {path: path.read_bytes() for path in done}
    time.sleep(1.5)  # workers whose parent is gone end with the row they are at
    there = _ratios((out / "results").glob("simrd*.json"))
    remaining, missing = _ratios(done)[:3], [ratio for ratio in ratios if ratio not in there]
    fewer = {"models": {"lstm": [{**command, "ratio": [*remaining, *missing[:3]]}]}}
    report = run_experiment(parse_experiment(fewer), out)
    assert (report.ran, report.reused) == (3, 4), "the baseline and what was done before the kill"
    assert {path: path.read_bytes() for path in before} == before
    assert {result["status"] for result in report.results} <= {"ok", "oom", "thrash"}


def test_trials_end_when_the_experiment_is_killed(tmp_path):
    command = {"type": "baseline", "n_reps": 10**7, "extra_params": SMALL}
    running = started(tmp_path, {"models": {"lstm": [command]}})
    (trial,) = wait_for(lambda: _trials(running.pid))
    time.sleep(2)  # until it works
    assert _trials(running.pid) == [trial]
    running.send_signal(signal.SIGKILL)
    running.wait()
    for _ in range(100):
        if not _runs(trial):
            return
        time.sleep(0.1)
    os.kill(trial, signal.SIGKILL)
    pytest.fail("the trial goes on although nobody waits for it")


def test_an_interrupted_trial_leaves_no_result(tmp_path):
    command = {"type": "baseline", "n_reps": 10**7, "extra_params": SMALL}
    running = started(tmp_path, {"models": {"lstm": [command]}})
    wait_for(lambda: _trials(running.pid))
    time.sleep(2)
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=30) != 0
    assert list((tmp_path / "out" / "results").iterdir()) == []


def test_a_trial_whose_process_dies_has_failed_and_the_others_go_on(tmp_path):
    endless = {"type": "baseline", "n_reps": 10**7, "extra_params": SMALL}
    fine = {"type": "baseline", "n_reps": 1, "extra_params": SMALL}
    running = started(tmp_path, {"models": {"lstm": [endless, fine]}})
    (trial,) = wait_for(lambda: _trials(running.pid))
    time.sleep(2)
    os.kill(trial, signal.SIGKILL)  # as when the machine runs out of memory
    assert running.wait(timeout=60) == 3
    rows = table(tmp_path / "out" / "summary" / "lstm.csv")
    assert [row["status"] for row in rows] == ["error", "ok"]
    assert "SIGKILL" in rows[0]["message"]


def _trials(experiment):
    """The processes that run trials for an experiment."""
    results = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{entry}/cmdline").read_bytes()
            parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == experiment and b"spawn_main" in line:
            results.append(int(entry))
    return results


def _runs(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# Logs that are saved, and logs that are brought along


def test_logs_are_saved_where_the_configuration_says_with_a_manifest(tmp_path):
    command = {"type": "dtr", "ratio": 0.9, "extra_params": SMALL, "batch_size": 2}
    config = {
        "models": {"lstm": [command]},
        "n_reps": 1,
        "n_inputs": 2,
        "save_logs": True,
        "log_dest": str(tmp_path / "logs"),
        "simrd_config": "sim_conf.json",
    }
    experiment = parse_experiment(config)
    assert experiment.notes == ()
    assert [trial.save_log for trial in experiment.trials] == [False, True]
    one = run_experiment(experiment, tmp_path / "out", workers=1)
    second = run_experiment(parse_experiment(config), tmp_path / "out", workers=1)
    assert second.ran == 0
    (log,) = (tmp_path / "logs").glob("*.log")
    assert log.name.startswith("lstm-2-0.9-")
    assert log in one.files
    listed = json.loads((tmp_path / "logs" / "sim_conf.json").read_text())
    assert [entry["log"] for entry in listed["lstm"]] == [str(log)]
    assert find_logs([tmp_path / "logs" / "sim_conf.json"])[0][0].title == "lstm (2)"
    # Reused in a configuration of its own, beside the same step recorded anew.
    commands = [
        {"type": "simrd", "kind": "use_log", "file_path": str(log), "ratio": 0.9, "config": {}},
        {"type": "simrd", "kind": "get_log", "memory_budget": -1, "extra_params": SMALL},
    ]
    report = run_experiment(parse(commands, n_reps=1), tmp_path / "used", workers=1)
    used, got = (row for row in report.results if row["type"] == "simrd")
    program = read_log(log)
    expected = simulate(program, budget=int(0.9 * unlimited_peak(program)), limit=10.0)
    assert (used["status"], used["overhead"]) == (expected.status, expected.overhead)
    assert got["status"] == "ok"
    assert not any(row["type"] == "baseline" for row in report.results)


def test_logs_that_are_not_there_are_refused_by_key_and_file(tmp_path):
    with raises(RematError, "compat.missing_field") as caught:
        parse([{"type": "simrd", "kind": "use_log"}])
    assert "file_path" in caught.value.message
    with raises(RematError, "compat.log_unreadable"):
        parse([{"type": "simrd", "kind": "use_log", "file_path": str(tmp_path / "no.log")}])
    with raises(RematError, "compat.kind_needs_simrd", fix="simrd"):
        parse([{"type": "dtr", "kind": "get_log", "memory_budget": 1e6}])
    with raises(RematError, "compat.log_dest"):
        parse([{"type": "baseline"}], log_dest=5)
    with raises(RematError, "compat.simrd_config"):
        parse([{"type": "baseline"}], simrd_config="../a.json")


def test_random_choices_are_told_as_the_mean_of_ten_seeds(tmp_path):
    log = Path(__file__).parents[2] / "remat" / "data" / "cnn-alias.log"
    command = {"type": "simrd", "kind": "use_log", "file_path": str(log), "heuristic": "random"}
    report = run_experiment(parse([{**command, "ratio": 0.9}]), tmp_path, workers=1)
    (row,) = report.results
    program = read_log(log)
    budget = int(0.9 * unlimited_peak(program))
    each = [
        simulate(program, heuristic="random", budget=budget, limit=10.0, seed=seed).overhead
        for seed in range(10)
    ]
    assert row["overhead"] == pytest.approx(sum(each) / 10, rel=1e-12)
    assert (row["least_overhead"], row["most_overhead"]) == (min(each), max(each))

"""`gradkeep metastore sweep`: the four methods side by side."""

import csv
import json

import pytest

from gradkeep.cli import _app


def sweep(*arguments):
    with pytest.raises(SystemExit) as end:
        _app.run(["metastore", "sweep", *arguments])
    return end.value.code or 0


def test_four_methods_make_a_table_and_pictures(vgg_folder, capsys):
    assert sweep("--data", "cifar10", "--samples", "25", "--queries", "2") == 0
    output = capsys.readouterr().out
    for method in ("ted", "half", "recon", "naive"):
        assert output.count(method) == 1
    with open(vgg_folder / "sweep" / "sweep.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows[:4]] == ["ted", "half", "recon", "naive"]
    size = {row["method"]: int(row["train_bytes"]) for row in rows[:4]}
    assert size["ted"] == size["half"] == size["recon"] < size["naive"]
    assert rows[0]["collect_seconds"]
    assert not rows[1]["collect_seconds"]  # ted's are used
    assert [bool(row["mean_query_seconds"]) for row in rows] == [False, True, True, False]
    assert all(float(row["query_seconds"]) > 0 for row in rows)
    assert (vgg_folder / "sweep" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (vgg_folder / "sweep" / "sweep.svg").read_text()


def test_what_cannot_be_run_is_told_and_the_rest_goes_on(vgg_folder, capsys):
    methods = ["--methods", "ted", "--samples", "5", "--queries", "1", "--json"]
    assert sweep("--data", "AGNews,cifar10", *methods) == 3
    rows = json.loads(capsys.readouterr().out)
    assert "data.AGNews.train_file" in rows[0]["error"]
    assert rows[0]["train_bytes"] is None
    assert rows[1]["error"] == ""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data", "mnist"], "--data: unknown name 'mnist'"),
        (["--methods", "magic"], "--methods: unknown name 'magic'"),
        (["--methods", ","], "--methods is empty"),
        (["--samples", "0"], "--samples cannot be '0'"),
        (["--queries", "x"], "--queries cannot be 'x'"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--config", "other.yaml"], "other.yaml: no block 'system'"),
    ],
)
def test_mistakes_are_told_before_anything_runs(vgg_folder, capsys, flags, words):
    (vgg_folder / "other.yaml").write_text("store: kept")
    assert sweep(*flags) == 2
    assert words in capsys.readouterr().err
    assert not (vgg_folder / "artifacts").exists()

"""`gradkeep evaluate ...` on a store with captures and a ground truth."""

import json
import shutil

import numpy as np
import pytest

from gradkeep import evaluate
from tests.evaluate.conftest import ROWS


@pytest.fixture
def folder(world, tmp_path):
    """A copy of the world, to be written to."""
    return shutil.copytree(world.location, tmp_path / "kept")


@pytest.fixture
def script(tmp_path):
    """A file with a recipe, as a user has one."""
    file = tmp_path / "mine.py"
    file.write_text("from tests.evaluate.conftest import recipe\n\nhow = recipe()\nnothing = 3\n")
    return file


def test_lds_shows_a_board_keeps_it_and_compares(inline, folder, tmp_path):
    shown = inline("evaluate", "lds", folder, "--method", "kernel", "--method", "random")
    assert shown.returncode == 0, shown.stderr
    assert "hybrid of kernel" in shown.stdout
    assert "reporting half: 20 subsets x 2 seeds" in shown.stdout
    reported = inline(
        "evaluate", "lds", folder, "--method", "kernel", "--json", "--plots", tmp_path / "p"
    )
    answer = json.loads(reported.stdout)
    by_name = {one["method"]: one for one in answer["methods"]}
    stored = evaluate.evaluations(folder)
    for one in by_name.values():
        assert stored[one["saved"]].value == one["value"]
        assert one["interval"][0] <= one["value"] <= one["interval"][1]
        assert one["queries"] == 12
        assert one["subsets"] == 20
        assert (tmp_path / "p" / f"{one['saved']}.png").stat().st_size > 1000
    random = next(name for name in stored if "random" in name)
    compared = inline("evaluate", "compare", folder, by_name["kernel"]["saved"], random)
    assert compared.returncode == 0
    assert "kernel" in compared.stdout
    unknown = inline("evaluate", "compare", folder, "a", "b")
    assert unknown.returncode == 2
    assert "no evaluation 'a'" in unknown.stderr


def test_a_truth_is_trained_from_a_script_and_remembered(inline, tmp_path, script):
    computed = inline(
        *("evaluate", "truth", tmp_path / "new", "--recipe", f"{script}:how"),
        *("--subsets", "10", "--seeds", "2", "--workers", "0"),
    )
    assert computed.returncode == 0, computed.stderr
    assert "10 subsets x 2 seeds, 12 queries; ceiling" in computed.stdout
    assert evaluate.load_truth(tmp_path / "new").recipe == f"{script}:how"
    for source, outputs in (
        (f"{script}:nothing", "is not a recipe"),
        (f"{script}:missing", "is not a recipe"),
        ("nowhere.py:how", "no such file"),
        ("no_such_module:how", "no_such_module"),
        ("how", "module:name"),
    ):
        bad = inline("evaluate", "truth", tmp_path / "other", "--recipe", source)
        assert bad.returncode == 2, source
        assert outputs in bad.stderr, source


def test_labels_leakage_removal_and_sanity(inline, folder, tmp_path, script):
    wrong = tmp_path / "wrong.txt"
    wrong.write_text("id\n" + "\n".join(str(row) for row in range(0, ROWS, 9)))
    actual = inline("evaluate", "labels", folder, "--wrong", wrong, "--json")
    assert actual.returncode == 0, actual.stderr
    answer = json.loads(actual.stdout)
    assert {one["subject"].split(" at ")[0] for one in answer} >= {"suspects by loss", "rank sum"}
    copies = tmp_path / "copies.csv"
    copies.write_text("query,row\n" + "\n".join(f"{q},{q}" for q in range(6)))
    actual = inline("evaluate", "leakage", folder, "--copies", copies)
    assert actual.returncode == 0, actual.stderr
    assert "6 planted copies" in actual.stdout
    actual = inline(
        *("evaluate", "removal", folder, "--recipe", f"{script}:how", "--size", "8"),
        *("--query", "1", "--query", "4", "--seeds", "2", "--workers", "0"),
    )
    assert actual.returncode == 0, actual.stderr
    assert "random rows" in actual.stdout
    actual = inline("evaluate", "sanity", folder, "--random-run", "random", "--json")
    assert json.loads(actual.stdout)["passed"] == (actual.returncode == 0)


def test_all_says_what_is_missing_and_goes_on(inline, folder):
    actual = inline("evaluate", "all", folder)
    assert actual.returncode == 0, actual.stderr
    for title in ("lds", "sanity", "labels", "leakage", "removal"):
        assert f"== {title}" in actual.stdout
    assert "--wrong FILE" in actual.stdout
    assert "--copies FILE" in actual.stdout
    assert "--recipe" in actual.stdout
    assert np.isfinite(next(iter(evaluate.evaluations(folder).values())).value)


@pytest.mark.parametrize("content", ["", "1 2\nx y\n", "1\n", "99999999999999999999 1\n"])
def test_files_of_ids_that_are_none_are_refused(inline, folder, tmp_path, content):
    file = tmp_path / "ids"
    file.write_text(content)
    actual = inline("evaluate", "leakage", folder, "--copies", file)
    assert actual.returncode == 2
    assert "Traceback" not in actual.stderr


def test_rows_are_selected_written_and_verified(inline, folder, tmp_path, script):
    out = tmp_path / "rows.csv"
    actual = inline(
        *("select", folder, "--target", "test", "--keep", "25%", "--out", out, "--json"),
        *("--recipe", f"{script}:how", "--seeds", "2", "--workers", "0"),
    )
    assert actual.returncode == 0, actual.stderr
    answer = json.loads(actual.stdout)
    assert len(answer["rows"]) == ROWS // 4
    assert answer["verified"]["metric"] == "gain over random rows"
    listed = out.read_text().splitlines()
    assert listed[0] == "id,value,reason"
    assert [int(line.split(",")[0]) for line in listed[1:]] == [row["id"] for row in answer["rows"]]
    for keep in ("0", "-3", "200%", "x", "0%", "99999"):
        assert inline("select", folder, "--keep", keep).returncode == 2, keep


def test_leaks_and_removals_by_command(inline, folder, tmp_path, script):
    actual = inline("leaks", folder, "--above", "0.5", "--json")
    assert actual.returncode == 0, actual.stderr
    assert all(row["value"] >= 0.5 for row in json.loads(actual.stdout)["rows"])
    ids = tmp_path / "ids.txt"
    ids.write_text("3\n7\n11\n")
    for rows in (ids, "3,7,11"):
        actual = inline(
            *("check-removal", folder, rows, "--recipe", f"{script}:how"),
            *("--seeds", "2", "--workers", "0", "--json"),
        )
        assert actual.returncode == 0, actual.stderr
        answer = json.loads(actual.stdout)
        assert answer["rows"] == [3, 7, 11]
        assert answer["change"]["rows"] == 3
    unknown = inline("check-removal", folder, "3,999", "--recipe", f"{script}:how")
    assert unknown.returncode == 2
    assert "unknown ids [999]" in unknown.stderr
    assert "--recipe" in inline("check-removal", folder, "3").stderr


def test_labels_are_suggested_by_command(inline, folder, tmp_path):
    script = tmp_path / "noisy.py"
    script.write_text(
        "import dataclasses, torch\n"
        "from tests.evaluate.conftest import recipe\n"
        "how = recipe()\n"
        "x, y = how.train\n"
        "x, y = torch.cat([x, x + 0.1]), torch.cat([y, y])\n"
        "y[::13] = (y[::13] + 1) % 3\n"
        "how = dataclasses.replace(how, train=(x, y))\n"
    )
    out = tmp_path / "labels.csv"
    actual = inline(
        *("suspects", folder, "--relabel", out, "--recipe", f"{script}:how"),
        *("--precision", "0.5", "--seeds", "2", "--workers", "0"),
    )
    assert actual.returncode == 0, actual.stderr
    assert out.read_text().splitlines()[0] == "id,value,reason,suggested"

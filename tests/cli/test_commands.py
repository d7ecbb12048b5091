"""Each command does what its help says, for people and for programs."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest

import gradkeep as gk


def answer(run, code=0):
    assert run.returncode == code, run.stderr
    assert run.stderr == ""
    return json.loads(run.stdout)


def flip(file, at=-3):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_info_shows_a_tree_with_sizes_ratios_and_row_states(gradkeep, folder):
    run = gradkeep("info", folder)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert "2 captures, 1 scores, 1 row set" in lines[0]
    assert "x smaller)" in lines[0]
    for text in (
        *(
            "run main",
            "checkpoint final  step 30",
            "train/main  40 rows",
            "x smaller than 104.0 kB",
        ),
        *("fc  Linear  650 parameters  16 B of 2.6 kB per row  162.5x", "scores dot  2 rows"),
        "rows farm  1 done, 1 leased, 1 failed, 1 pending",
    ):
        assert text in run.stdout


def test_info_json_has_these_keys(gradkeep, folder):
    fields = answer(gradkeep("info", folder, "--json"))
    assert set(fields) == {
        *(
            "location",
            "uuid",
            "bytes",
            "dense_bytes",
            "ratio",
            "runs",
            "scores",
            "row_sets",
            "bases",
            "moments",
            "evaluations",
        )
    }
    (run,) = fields["runs"]
    assert set(run) == {"name", "record", "checkpoints"}
    (checkpoint,) = run["checkpoints"]
    assert set(checkpoint) == {"name", "record", "captures"}
    assert checkpoint["record"]["step"] == 30
    block = {
        *("kind", "name", "run", "checkpoint", "split", "folder", "state", "problem", "version"),
        *("rows", "num_rows", "unsealed_rows", "num_segments", "data_bytes", "bytes", "modified"),
        *("schema_hash", "fingerprints", "layers", "arrays", "dense_bytes", "ratio"),
    }
    for capture in checkpoint["captures"]:
        assert set(capture) == block
        assert set(capture["layers"][0]) == {"name", "type", "parameters", "row_bytes"}
    assert set(fields["row_sets"][0]) == block | {"done", "leased", "failed", "pending"}


def test_info_of_an_empty_store(inline, tmp_path):
    gk.open(tmp_path / "empty")
    run = inline("info", "empty")
    assert (run.returncode, run.stdout.strip()) == (
        0,
        "Store 'empty': 0 captures, 0 scores, 0 row sets, 0 B",
    )


def test_info_shows_damage_and_the_rest(inline, folder):
    (folder / "blocks/main/final/train/main/schema.json").write_text("{}")
    run = inline("info", folder)
    assert run.returncode == 0
    assert "schema.json: the document does not match its checksum" in run.stdout
    assert "test/main  8 rows" in run.stdout


def test_verify_of_a_healthy_store(gradkeep, folder):
    run = gradkeep("verify", folder)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("healthy: ")
    fields = answer(gradkeep("verify", folder, "--json"))
    assert set(fields) == {
        *("healthy", "files", "bytes", "damage", "orphans", "unknown", "repaired"),
        *("segments", "read"),
    }
    assert fields["healthy"] is True
    assert fields["read"] == fields["segments"] > 1
    some = answer(gradkeep("verify", folder, "--sample", "1", "--json"))
    assert (some["read"], some["segments"]) == (1, fields["segments"])
    assert "a sample: 1 of" in gradkeep("verify", folder, "--sample", "1").stdout


def test_verify_names_each_damaged_file_and_tensor_and_repairs(gradkeep, folder):
    key = "blocks/main/final/train/main/seg/000001.safetensors"
    flip(folder / key)
    flip(folder / "STORE.json", at=20)
    run = gradkeep("verify", folder)
    assert run.returncode == 1
    assert f"damaged  {key}  tensor 'fc.prefix'" in run.stdout
    assert "damaged  STORE.json" in run.stdout
    assert "--repair" in run.stderr

    fields = answer(gradkeep("verify", folder, "--json", "--repair"), code=1)
    assert {(item["path"], item["tensor"]) for item in fields["damage"]} == {
        (key, "fc.prefix"),
        ("STORE.json", None),
    }
    assert not (folder / key).exists()
    assert len(list((folder / "quarantine").iterdir())) == 2
    assert answer(gradkeep("verify", folder, "--json"), code=1)["damage"][0]["path"] == key


def test_sql_as_table_json_and_csv(inline, folder):
    query = "select label, count(*) as n, sum(loss) as loss from samples group by label order by 1"
    run = inline("sql", folder, query)
    assert run.stdout.splitlines() == ["label   n  loss", "    0  24   392", "    1  24   416"]
    assert answer(inline("sql", folder, query, "--json")) == {
        "columns": ["label", "n", "loss"],
        "rows": [[0, 24, 392.0], [1, 24, 416.0]],
    }
    text = inline("sql", folder, "select null as a, 'x, y' as b", "--csv").stdout
    assert list(csv.reader(io.StringIO(text))) == [["a", "b"], ["", "x, y"]]


def test_sql_json_is_strict_json(inline, folder):
    query = (
        "select 'nan'::double as a, timestamp '2026-01-02 03:04:05' as b, 1.5::decimal(4,2) as c"
    )
    rows = answer(inline("sql", folder, query, "--json"))["rows"]
    assert rows == [[None, "2026-01-02 03:04:05", "1.50"]]


def test_sql_refuses_to_write(inline, folder, tmp_path):
    for query in (
        f"copy samples to '{tmp_path}/stolen.csv'",
        "insert into samples values (1)",
        f"attach '{tmp_path}/stolen.db'",
        "select * from read_csv('/etc/passwd')",
    ):
        run = inline("sql", folder, query)
        assert run.returncode == 2
        assert "root:" not in run.stdout + run.stderr
        assert "Traceback" not in run.stderr
    assert not list(tmp_path.glob("stolen*"))


def test_gc_removes_old_versions(inline, folder):
    gk.open(folder).drop_rows(gk.store.CaptureKey("final", "train"), [0])
    would = answer(inline("gc", folder, "--dry-run", "--json"))
    assert set(would) == {"dry_run", "files", "bytes"}
    assert any("manifest/000000.json" in file for file in would["files"])
    stored = answer(inline("gc", folder, "--keep-versions", "2", "--dry-run", "--json"))
    assert not any("manifest" in file for file in stored["files"])
    run = inline("gc", folder)
    assert run.returncode == 0
    assert f"removed {len(would['files'])} files" in run.stdout
    assert answer(inline("gc", folder, "--json"))["files"] == []
    assert answer(inline("verify", folder, "--json"))["healthy"]


def test_delete_asks_for_yes_and_deletes(inline, folder):
    name = "main/final/test/main"
    run = inline("delete", folder, name)
    assert run.returncode == 2
    assert "8 rows" in run.stderr
    assert "--yes" in run.stderr
    assert len(gk.open(folder).captures()) == 2
    fields = answer(inline("delete", folder, name, "--yes", "--json"))
    assert set(fields) == {"deleted", "rows", "bytes"}
    assert fields["deleted"] == f"blocks/{name}"
    assert len(gk.open(folder).captures()) == 1
    assert inline("delete", folder, "scores/dot", "--yes").returncode == 0
    assert gk.open(folder).scores() == []


@pytest.mark.parametrize(
    "name", ["main/final/nothing/main", "scores/nothing", "final", "../../etc", "a/b/c/.."]
)
def test_delete_of_what_is_not_there_is_an_error(inline, folder, name):
    before = sorted(folder.rglob("*"))
    run = inline("delete", folder, name, "--yes")
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    assert set(before) <= set(folder.rglob("*"))


def bad_places(folder, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("x")
    (tmp_path / "bare").mkdir()
    return ["missing", "file", "link", "other", "bare", "file/below"]


@pytest.mark.parametrize("command", [["info"], ["verify"], ["sql", "select 1"], ["gc"]])
def test_a_place_that_is_no_store_is_named_and_left_alone(inline, folder, tmp_path, command):
    for place in bad_places(folder, tmp_path):
        before = sorted(tmp_path.rglob("*"))
        run = inline(command[0], place, *command[1:])
        assert (run.returncode, run.stdout) == (2, ""), place
        assert run.stderr.startswith(f"gradkeep: {place}: ")
        assert run.stderr.count("\n") >= 2  # the problem and what to do
        assert sorted(tmp_path.rglob("*")) == before


def test_an_error_is_json_too_if_asked_for(inline):
    fields = answer(inline("info", "missing", "--json"), code=2)
    assert set(fields["error"]) == {"type", "code", "message", "path", "found", "expected", "fix"}
    assert fields["error"]["type"] == "NotAStoreError"


@pytest.mark.parametrize("command", [["info"], ["verify"], ["verify", "--repair"], ["gc"]])
def test_a_store_of_a_later_version_is_left_alone(inline, folder, command):
    from gradkeep.store import _document

    file = folder / "STORE.json"
    fields = _document.from_bytes(file.read_bytes(), path="")
    file.write_bytes(_document.to_bytes({**fields, "version": 99}))
    before = file.read_bytes()
    run = inline(command[0], folder, *command[1:])
    assert run.returncode == 2
    assert "Upgrade gradkeep" in run.stderr
    assert file.read_bytes() == before


def test_a_damaged_store_file_is_an_error_that_names_verify(inline, folder):
    flip(Path(folder, "STORE.json"), at=20)
    run = inline("info", folder)
    assert run.returncode == 2
    assert "gradkeep verify" in run.stderr


def test_results_of_trak_come_into_a_store(inline, tmp_path):
    folder = tmp_path / "old"
    (folder / "0").mkdir(parents=True)
    (folder / "scores").mkdir()
    about = {"JL dimension": 3, "JL matrix type": "normal", "train set size": 4}
    (folder / "metadata.json").write_text(json.dumps(about))
    (folder / "id_0.json").write_text('{"0": {"is_featurized": 1, "is_finalized": 1}}')
    output = {"num_targets": 2, "scores_path": "gone", "scores_finalized": 1}
    (folder / "experiments.json").write_text(json.dumps({"test": output}))
    arrays = {
        "0/grads": np.ones((4, 3), np.float32),
        "0/out_to_loss": np.ones((4, 1), np.float32),
        "0/_is_featurized": np.ones((4, 1), np.int32),
        "scores/test": np.arange(8, dtype=np.float32).reshape(4, 2),
    }
    for name, values in arrays.items():
        with (folder / f"{name}.mmap").open("wb") as file:
            np.save(file, values)
    done = inline("import", "trak", folder)
    assert done.returncode == 0, done.stderr
    assert "scores test" in done.stdout
    scores = gk.Scores.load(gk.open(tmp_path / "old-gradkeep"), "test")
    assert np.array_equal(scores.values, arrays["scores/test"].T)
    assert inline("import", "trak", tmp_path / "nowhere").returncode == 2

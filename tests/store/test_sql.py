"""SQL answers from checked bytes, reads only, and loads only what a query names."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from raises import raises

import gradkeep as gk
from gradkeep.errors import DamagedError, MissingExtraError, MissingRowsError, StoreError
from gradkeep.store import LocalDisk, Memory, Store
from gradkeep.store.backends._disk import Syscalls

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")

SCALARS = (
    gk.store.Array("loss"),
    gk.store.Array("label", "int64"),
    gk.store.Array("emb", shape=(3,), kind="data"),
)
TRAIN = gk.store.CaptureKey(checkpoint="final", split="train")


def values(count):
    return {
        "loss": np.arange(count, dtype="f4"),
        "label": np.arange(count) % 2,
        "emb": np.zeros((count, 3), "f4"),
    }


def write(store, key, arrays, columns, **options):
    count = len(next(iter(columns.values())))
    with store.write(key, gk.store.Schema(arrays, rows_per_segment=4), **options) as writer:
        writer.append(np.arange(writer.position, writer.position + count), columns)


@pytest.fixture
def store(tmp_path):
    store = gk.open(tmp_path / "store", durability="process")
    write(store, TRAIN, SCALARS, values(10))
    return store


def parquet_of(store):
    (file,) = Path(store.location).rglob("*.parquet")
    return file


def test_samples_hold_labels_ids_and_every_scalar(store):
    result = store.sql("select * from samples order by id")
    assert result.columns == ["run", "checkpoint", "split", "capture", "id", "loss", "label"]
    assert len(result) == 10
    assert result.rows()[3] == ("main", "final", "train", "main", 3, 3.0, 1)


def test_an_answer_as_rows_arrow_and_pandas(store):
    result = store.sql(
        "select label, sum(loss) as loss, sum(id) as ids from samples group by label"
    )
    rows = [(0, 20.0, 20), (1, 25.0, 25)]
    assert sorted(result.rows()) == rows
    assert sorted(map(tuple, result.to_pandas().itertuples(index=False))) == rows
    assert str(result.arrow().schema.field("ids").type) == "int64"


def test_captures_with_different_scalars_are_joined_by_name(store):
    other = (
        gk.store.Array("loss", "float64"),
        gk.store.Array("margin"),
        gk.store.Array("label", "bool"),
    )
    half = gk.store.Array("half", "float16", kind="data")
    passed = {"loss": np.array([0.1]), "margin": np.ones(1, "f4"), "label": np.array([True])}
    write(
        store,
        gk.store.CaptureKey("final", "test"),
        (*other, half),
        {**passed, "half": np.ones(1, "f2")},
    )
    actual = store.sql(
        "select loss, margin, label, half, emb_free from (select *, 1 as emb_free from samples) where split = 'test'"
    )
    assert actual.rows() == [(0.1, 1.0, 1, 1.0, 1)]
    missing = "select count(*) from samples where margin is null and half is null"
    assert store.sql(missing).rows() == [(10,)]


def test_names_that_differ_only_in_case_stay_apart(tmp_path):
    store = gk.open(tmp_path / "store")
    arrays = (gk.store.Array("Loss", "int64"), gk.store.Array("loss", "int64"))
    write(store, TRAIN, arrays, {"Loss": np.array([1]), "loss": np.array([2])})
    assert store.sql(
        "select * exclude (run, checkpoint, split, capture, id) from samples"
    ).rows() == [(1, 2)]


def test_only_the_newest_version_of_a_sealed_capture_is_seen(store):
    store.drop_rows(TRAIN, [0, 1])
    unsealed = store.write(
        gk.store.CaptureKey("later", "train"), gk.store.Schema(SCALARS, rows_per_segment=4)
    )
    unsealed.append(np.arange(4), values(4))
    unsealed.flush()
    unsealed.close()
    assert store.sql("select count(*), min(id) from samples").rows() == [(8, 2)]
    assert store.sql("select checkpoint, state, version from captures order by 1").rows() == [
        ("final", "sealed", 1),
        ("later", "open", None),
    ]


def test_the_other_tables(store):
    store.add_run(gk.store.Run("main", config={"lr": 0.1}, code="abc"))
    store.add_checkpoint(gk.store.Checkpoint("main", "final", "w1", step=30, lr=0.5))
    schema = gk.store.Schema(
        (gk.store.Array("score", shape=(2,), kind="data"),), fingerprints={"method": "dot"}
    )
    with store.write(gk.store.ScoresKey("mine"), schema) as writer:
        writer.append([0, 1, 2], {"score": np.zeros((3, 2), "f4")})
    assert store.sql("from runs").rows() == [("main", '{"lr": 0.1}', "abc", None)]
    assert store.sql("from checkpoints").rows() == [("main", "final", "w1", 30, 0.5, None)]
    expected = "select name, rows, fingerprints->>'method' from scores"
    assert store.sql(expected).rows() == [("mine", 3, "dot")]
    joined = (
        "select c.step, count(*) from samples join checkpoints c using (run, checkpoint) group by 1"
    )
    assert store.sql(joined).rows() == [(30, 10)]


def test_an_empty_store_has_all_tables(tmp_path):
    store = gk.open(tmp_path / "store")
    assert store.sql("show tables").rows() == [
        (name,) for name in ("captures", "checkpoints", "runs", "samples", "scores")
    ]
    for table in ("captures", "checkpoints", "runs", "samples", "scores"):
        assert store.sql(f"select * from {table}").rows() == []


@pytest.mark.parametrize(
    "query",
    [
        "describe samples",
        "show samples",
        "summarize samples",
        "explain select * from samples",
        "explain analyze select * from samples",
        "pragma table_info('samples')",
        "pivot samples on label using count(*) group by split",
        "with mine as (select * from samples) select * from mine;",
        "values (1)",
    ],
)
def test_reading_statements_are_answered(store, query):
    assert len(store.sql(query)) >= 1


@pytest.mark.parametrize(
    "query",
    [
        "copy samples to '{folder}/stolen.csv'",
        "copy (select 1) to '{folder}/stolen.parquet'",
        "explain analyze copy (select 1) to '{folder}/stolen.csv'",
        "insert into samples values (1)",
        "delete from samples",
        "update runs set run = 'x'",
        "create table t (a int)",
        "create table t as select * from samples",
        "drop view samples",
        "attach '{folder}/stolen.db'",
        "export database '{folder}/stolen'",
        "select * from read_csv('/etc/passwd')",
        "select * from read_text('/etc/passwd')",
        "select * from '/etc/passwd'",
        "select * from glob('/etc/*')",
        "install httpfs",
        "load httpfs",
        "set enable_external_access = true",
        "pragma memory_limit = '1GB'",
        "reset lock_configuration",
        "checkpoint",
        "begin",
        "select 1; select 2",
        "",
        "-- nothing",
        "selec 1",
        "select * from nothing_like_this",
        "select * from store",
    ],
)
def test_everything_else_is_refused_with_a_typed_error(store, tmp_path, query):
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    with pytest.raises(StoreError):
        store.sql(query.format(folder=tmp_path))
    assert not list(tmp_path.rglob("stolen*"))
    assert before.keys() <= set(tmp_path.rglob("*"))


def test_a_query_does_not_see_the_variables_of_the_caller(store):
    import pyarrow as pa

    secret = pa.table({"a": [1]})
    with pytest.raises(StoreError, match="secret"):
        store.sql("select * from secret")
    assert secret.num_rows == 1


def test_a_refusal_says_that_sql_only_reads(store):
    with raises(StoreError, "store.sql_not_reading") as caught:
        store.sql("delete from samples")
    assert "DELETE" in str(caught.value.found)


def test_an_error_in_the_query_carries_the_engines_words(store):
    with pytest.raises(StoreError, match="losss") as caught:
        store.sql("select losss from samples")
    assert "DESCRIBE" in caught.value.fix


def test_a_damaged_parquet_fails_the_queries_that_need_it_and_no_others(store):
    store.add_run(gk.store.Run("main"))
    file = parquet_of(store)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedError, match=file.name):
        store.sql("select avg(loss) from samples")
    with pytest.raises(DamagedError, match=file.name):
        store.sql("pivot samples on label using count(*)")
    assert len(store.sql("select 'samples', * from runs")) == 1
    assert len(store.sql("select * from captures")) == 1


def test_a_damaged_record_fails_only_queries_on_its_table(store):
    store.add_run(gk.store.Run("main"))
    Path(store.location, "runs/main/run.json").write_text("{}")
    with pytest.raises(DamagedError, match=r"runs/main/run\.json"):
        store.sql("select * from runs")
    assert len(store.sql("select * from samples")) == 10


def test_a_parquet_that_is_gone_is_derived_again(store):
    file = parquet_of(store)
    content = file.read_bytes()
    file.unlink()
    assert store.sql("select sum(loss) from samples").rows() == [(45.0,)]
    assert parquet_of(store).read_bytes() == content


def test_lost_rows_are_never_left_out_in_silence(store):
    parquet_of(store).unlink()
    store.backend.move_aside(f"{TRAIN.folder}/seg/000001.safetensors")
    with pytest.raises(MissingRowsError, match="000001"):
        store.sql("select count(*) from samples")


class ReadOnlyCalls(Syscalls):
    def create(self, path):
        raise OSError(30, "Read-only file system")

    make_folder = unlink = create


@pytest.mark.parametrize("derived", [True, False], ids=["with-parquet", "without"])
def test_a_store_that_may_only_be_read_is_queried(store, derived):
    if not derived:
        parquet_of(store).unlink()
    before = sorted(Path(store.location).rglob("*"))
    frozen = Store(LocalDisk(store.location, syscalls=ReadOnlyCalls()))
    assert frozen.sql("select sum(loss) from samples").rows() == [(45.0,)]
    assert sorted(Path(store.location).rglob("*")) == before


def test_a_store_in_memory_is_queried():
    store = gk.open(Memory())
    write(store, TRAIN, SCALARS, values(10))
    assert store.sql("select count(*) from samples").rows() == [(10,)]


def test_nan_is_not_null(tmp_path):
    store = gk.open(tmp_path / "store")
    write(
        store, TRAIN, (gk.store.Array("loss", nan="keep"),), {"loss": np.array([np.nan, 1], "f4")}
    )
    actual = store.sql("select count(loss), count(*) filter (where isnan(loss)) from samples")
    assert actual.rows() == [(2, 1)]


def test_a_result_shows_itself_as_a_small_table(store):
    shown = repr(store.sql("select id, 'a<b>' as text, null as nothing from samples order by id"))
    assert shown.splitlines()[:2] == ["id  text  nothing", " 0  a<b>  NULL"]
    html = store.sql("select 'a<b>' as \"<i>\"")._repr_html_()
    assert "a&lt;b&gt;" in html
    assert "<i>" not in html
    assert "... 980 more rows" in repr(store.sql("from range(1000)"))


def test_a_missing_package_names_the_extra(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e .*\[sql\]"):
        store.sql("select 1")


def test_sql_never_imports_torch(store):
    code = (
        "import sys, gradkeep as gk\n"
        f"gk.open({store.location!r}).sql('select * from samples').rows()\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)

"""Rows and their numbers: what is not meant exactly as it is given is refused, never rounded."""

import time

import numpy as np
import pytest
import torch
from raises import raises

import gradkeep as gk
from gradkeep.errors import InvalidRowsError, StoreError
from gradkeep.store import _document, verify

KEY = gk.store.CaptureKey(checkpoint="final", split="train")
ODD_IDS = [
    [3.7],
    [3.0],
    3.0,
    np.array([1.9]),
    torch.tensor([2.0]),
    [True],
    [1, True],
    np.array([True]),
    ["1"],
    "1",
    [None],
    [[1], [2, 3]],
    [2**64],
    [2**63],
    [1, 2.5],
]


@pytest.fixture
def store():
    return gk.open(gk.store.Memory(), durability="process")


@pytest.fixture
def block(store):
    with store.write(KEY, gk.store.Schema((gk.store.Array("loss"),))) as writer:
        writer.append(np.arange(6), {"loss": np.arange(6, dtype=np.float32)})
    return store.read(KEY)


@pytest.fixture
def rows(store):
    actual = store.rows("models", gk.store.Schema((gk.store.Array("out"),)), num_rows=5)
    for row in range(4):
        actual.put(row, {"out": np.float32(row)})
    return actual


@pytest.mark.parametrize("ids", ODD_IDS, ids=repr)
def test_only_whole_numbers_name_rows(store, block, rows, ids):
    writer = store.write(
        gk.store.CaptureKey("other", "train"), gk.store.Schema((gk.store.Array("loss"),))
    )
    for use in (
        lambda: block.read(ids),
        lambda: block.read_rows(ids),
        lambda: block.positions(ids),
        lambda: store.drop_rows(KEY, ids),
        lambda: rows.read(ids),
        lambda: rows.retry(ids if isinstance(ids, list) else [ids]),
        lambda: writer.append(ids, {"loss": [0.0]}),
        lambda: rows.put(ids, {"out": 1.0}),
    ):
        with pytest.raises((InvalidRowsError, StoreError)):
            use()
    writer.close()
    assert len(store.read(KEY)) == 6


@pytest.mark.parametrize("ids", [[3], (3,), np.array([3], np.int8), torch.tensor([3]), range(3, 4)])
def test_whole_numbers_of_any_kind_do(store, block, rows, ids):
    assert block.read(ids)["loss"].tolist() == [3.0]
    assert rows.read(ids)["out"].tolist() == [3.0]
    store.drop_rows(KEY, ids)
    assert store.read(KEY).ids.tolist() == [0, 1, 2, 4, 5]


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("int64", [1.5, 2.0]),
        ("int64", [1.0, 2.0]),
        ("int32", [2**31, 0]),
        ("uint8", [-1, 0]),
        ("uint8", [256, 0]),
        ("int64", [2**63, 0]),
        ("int64", ["1", "2"]),
        ("int64", [None, 1]),
        ("bool", [0, 2]),
        ("bool", [0.5, 1.0]),
        ("float32", ["1", "2"]),
        ("float32", [1j, 2]),
        ("float32", [[1], [2, 3]]),
    ],
)
def test_a_list_is_never_cut_to_fit(store, dtype, values):
    writer = store.write(KEY, gk.store.Schema((gk.store.Array("a", dtype),)))
    with pytest.raises(InvalidRowsError) as caught:
        writer.append([0, 1], {"a": values})
    writer.close()
    assert "'a'" in caught.value.message


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("int64", [1, -2]),
        ("int64", [True, False]),
        ("uint8", [0, 255]),
        ("uint64", [0, 2**64 - 1]),
        ("bool", [True, False]),
        ("float32", [1, 2.5]),
        ("float32", [torch.tensor(1.0), torch.tensor(2.0)]),
        ("int64", [torch.tensor(1), torch.tensor(2)]),
        ("float64", [2**60, 0.5]),
    ],
)
def test_a_list_that_fits_is_kept(store, dtype, values):
    with store.write(KEY, gk.store.Schema((gk.store.Array("a", dtype),))) as writer:
        writer.append([0, 1], {"a": values})
    assert store.read(KEY).column("a").tolist() == [
        value.item() if hasattr(value, "item") else value for value in values
    ]


@pytest.mark.parametrize("count", [0, -1, 1.5, True, None, "1"])
def test_no_claim_of_nothing_takes_everything(rows, count):
    with pytest.raises(InvalidRowsError, match="count"):
        rows.claim(count=count)
    assert all(state.state != "leased" for state in rows.states())


@pytest.mark.parametrize("number", ["x", 1.5, None, [1], -1])
def test_odd_versions_and_counts_are_refused(store, block, rows, number):
    if number is not None:
        with pytest.raises(StoreError):
            store.read(KEY, version=number)
    with pytest.raises(StoreError):
        gk.store.gc(store, keep_versions=number)
    with pytest.raises(StoreError):
        rows.compact(rows_per_file=number)


@pytest.mark.parametrize("name", ["__metadata__", "a\ud800", "ids", "a#b", ""])
def test_names_that_a_file_cannot_hold_are_refused(name):
    code = "store.array_name" if name.isascii() else "argument.invalid"
    with raises(StoreError, code):
        gk.store.Array(name)


@pytest.mark.parametrize("size", [-1, 2**40 + 1, 99999999999999999999, 10**30, 1.5, True, "5"])
def test_absurd_sizes_are_refused_before_anything_is_written(store, size):
    schema = gk.store.Schema((gk.store.Array("out"),))
    with pytest.raises(StoreError):
        store.rows("absurd", schema, num_rows=size)
    assert store.row_sets() == []
    rows = store.rows("models", schema, num_rows=3)
    with pytest.raises(StoreError):
        rows.grow(size)
    assert rows.num_rows == 3


@pytest.mark.parametrize(
    "odd",
    [
        *({"step": "x"}, {"step": 10**30}, {"step": 1.5}, {"step": True}, {"lr": "x"}),
        *({"lr": float("nan")}, {"parent": 3}, {"weights": None}, {"name": "../x"}),
    ],
)
def test_odd_records_are_refused(store, odd):
    fields = {"run": "main", "name": "final", "weights": "1a", **odd}
    with pytest.raises(StoreError):
        store.add_checkpoint(gk.store.Checkpoint(**fields))
    assert store.checkpoints() == []
    with pytest.raises(StoreError):
        store.add_run(gk.store.Run("main", {"a": {1, 2}}))
    assert store.runs() == []


def test_what_an_older_version_let_in_leaves_the_rest_of_the_store_alone(tmp_path):
    pytest.importorskip("duckdb")
    store = gk.open(tmp_path / "store", durability="process")
    with store.write(KEY, gk.store.Schema((gk.store.Array("loss"),))) as writer:
        writer.append([0, 1], {"loss": [1.0, 3.0]})
    store.rows("models", gk.store.Schema((gk.store.Array("out"),)), num_rows=2)
    odd = {
        "runs/main/ckpt/final/ckpt.json": {"run": "main", "name": "final", "weights": "1a"}
        | {"step": "x", "lr": None, "parent": None},
        "datamodels/models/size/99999999999999999999.json": {"num_rows": 99999999999999999999},
    }
    for key, fields in odd.items():
        store.backend.put_if_absent(key, [_document.to_bytes(fields)], durability="process")
    info = store.info()
    assert [block.rows for block in info.captures] == [2]
    assert (info.row_sets[0].facts.num_rows, info.row_sets[0].pending) == (2, 2)
    assert "'x'" in str(info.runs[0].checkpoints[0].record.problem) or info.runs
    assert store.sql("select avg(loss) from samples").rows() == [(2.0,)]
    assert store.sql("select count(*) from captures").rows() == [(1,)]
    with pytest.raises(StoreError, match="ckpt"):
        store.sql("select * from checkpoints")
    assert {item.path for item in verify(store.location).damage} == set(odd)
    verify(store.location, repair=True)
    assert verify(store.location).healthy


def test_many_rows_to_come_cost_nothing(store):
    store.rows("models", gk.store.Schema((gk.store.Array("out"),)), num_rows=2**40)
    start = time.monotonic()
    (actual,) = store.info().row_sets
    assert (actual.done, actual.pending) == (0, 2**40)
    with raises(InvalidRowsError, "store.too_many_states", fix="counts()"):
        store.rows("models").states()
    assert time.monotonic() - start < 2


def test_an_error_text_is_kept_in_part_if_it_is_long(store, rows):
    (lease,) = rows.claim()
    rows.fail(lease, "BEGIN" + "x" * 50_000_000 + "END")
    text = rows.states()[4].error
    assert text.startswith("BEGIN")
    assert text.endswith("END")
    assert "characters left out" in text
    assert len(text) < 70_000
    assert all(x.size < 80_000 for x in store.backend.list("datamodels/models/failed/000000"))


def test_half_a_pair_of_surrogates_is_kept_readable(store, rows):
    (lease,) = rows.claim(owner="w\udcff")
    rows.fail(lease, ValueError("file \udcff.txt"))
    assert "\\udcff" in rows.states()[4].error
    run = store.add_run(gk.store.Run("main", {"path": "a\ud800b"}, code="c\udfff"))
    assert store.runs() == [run]
    assert store.add_run(run) == run
    repr(store.info()), store.info().to_fields()
    assert store.sql("select code from runs").rows() == [("c\\udfff",)]
    schema = gk.store.Schema((gk.store.Array("loss"),), fingerprints={"path": "\ud800"})
    with store.write(KEY, schema) as writer:
        writer.append([0], {"loss": [1.0]})
    assert store.read(KEY).schema.fingerprints == {"path": "\ud800"}
    store.sql("select fingerprints from captures")
    assert verify(store).healthy


def test_an_error_that_cannot_be_shown_is_recorded(rows):
    class Broken(Exception):
        def __str__(self):
            raise RuntimeError("no")

    (lease,) = rows.claim()
    rows.fail(lease, Broken())
    assert "Broken" in rows.states()[4].error


def test_compaction_is_linear(tmp_path):
    """Twice the rows take about twice as long; it was four times."""

    def seconds(count):
        store = gk.open(tmp_path / str(count), durability="process")
        rows = store.rows("models", gk.store.Schema((gk.store.Array("out"),)), num_rows=count)
        for row in range(count):
            rows.put(row, {"out": np.float32(row)})
        start = time.process_time()
        assert rows.compact(rows_per_file=50) == count
        took = time.process_time() - start
        assert rows.read(range(count))["out"].tolist() == list(range(count))
        return took

    small = seconds(1000)
    assert seconds(4000) < 9 * small


def test_rows_put_while_others_are_packed_are_packed_too(tmp_path):
    store = gk.open(tmp_path, durability="process")
    rows = store.rows("models", gk.store.Schema((gk.store.Array("out"),)), num_rows=40)
    for row in range(20):
        rows.put(row, {"out": np.float32(row)})
    other = store.rows("models")
    publish = rows._adopt

    def adopt(*args, **named):
        done = publish(*args, **named)
        for row in range(20, 40):
            other.put(row, {"out": np.float32(row)})
        return done

    rows._adopt = adopt
    assert rows.compact(rows_per_file=10) == 40
    assert store.rows("models").read(range(40))["out"].tolist() == list(range(40))


def test_a_size_under_another_name_is_not_believed(tmp_path):
    store = gk.open(tmp_path, durability="process")
    store.rows("models", gk.store.Schema((gk.store.Array("out"),)), num_rows=6)
    size = tmp_path / "datamodels/models/size/000000000006.json"
    size.rename(size.with_name("100000000006.json"))
    with raises(StoreError, "store.misnamed_size"):
        len(store.rows("models").states())
    assert not verify(tmp_path).healthy

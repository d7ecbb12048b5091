"""Models come from other layouts and go back to them, bit for bit."""

import numpy as np
import pytest
import torch
from raises import raises

import gradkeep as gk
from gradkeep.compat import datamodels
from gradkeep.datamodels._contract import initialize
from gradkeep.datamodels._spec import Spec
from gradkeep.errors import DatamodelsError, EvidenceWarning, SchemaMismatchError

SPEC = Spec.from_fields(
    {
        "num_models": 5,
        "schema": {
            "margins": {"shape": [2, 3], "dtype": "float16"},
            "masks": {"shape": [11], "dtype": "bool_"},
            "seen": {"shape": [], "dtype": "int"},
        },
    }
)


def row(index):
    rng = np.random.default_rng(index)
    return {
        "margins": rng.normal(size=(2, 3)).astype("f2"),
        "masks": rng.random(11) < 0.5,
        "seen": np.int64(index),
    }


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "arrays").mkdir()
    created = datamodels.NpyFolder.create(tmp_path / "arrays", SPEC)
    for index in (0, 3, 4):
        created.write(index, row(index))
    return created


def test_a_folder_of_arrays_goes_in_and_comes_out_the_same(tmp_path, folder):
    store = gk.open(tmp_path / "store", durability="process")
    assert datamodels.import_folder(store, folder.path) == 3
    assert datamodels.import_folder(store, folder.path) == 0, "again is free"
    rows = store.rows("models")
    assert rows.done().tolist() == [0, 3, 4]
    assert rows.num_rows == 5
    assert datamodels.export_folder(store, tmp_path / "back") == 3
    for file in folder.path.glob("*.npy"):
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()


def test_an_export_never_overwrites(tmp_path, folder):
    store = gk.open(tmp_path / "store", durability="process")
    datamodels.import_folder(store, folder.path)
    with raises(DatamodelsError, "compat.folder_not_empty") as caught:
        datamodels.export_folder(store, folder.path)
    assert "3 models done" in caught.value.found


def test_other_arrays_under_the_same_name_are_refused(tmp_path, folder):
    store = gk.open(tmp_path / "store", durability="process")
    initialize(
        store,
        Spec.from_fields({"num_models": 5, "schema": {"masks": {"shape": [11], "dtype": "bool"}}}),
    )
    with pytest.raises(SchemaMismatchError, match="margins"):
        datamodels.import_folder(store, folder.path)


def test_a_folder_without_flags_or_with_uneven_arrays_is_refused(tmp_path, folder):
    with raises(DatamodelsError, "compat.not_a_store_directory", fix="initialize_store"):
        datamodels.NpyFolder.open(tmp_path)
    np.save(folder.path / "odd.npy", np.zeros(4))
    with raises(DatamodelsError, "compat.array_lengths"):
        datamodels.NpyFolder.open(folder.path)


def publish(place, shares=(50,), count=9):
    (place / "data").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for share in shares:
        arrays = {
            "train_masks": rng.random((count, 12)) < share / 100,
            "test_margins": rng.normal(size=(count, 4)).astype("f2"),
            "train_margins": rng.normal(size=(count, 12)).astype("f2"),
        }
        for name, values in arrays.items():
            np.save(place / "data" / f"{name}_{share}pct.npy", values)


def test_published_arrays_are_imported_as_bits_and_float16(tmp_path):
    publish(tmp_path / "cifar")
    store = gk.open(tmp_path / "store", durability="process")
    assert datamodels.import_published(store, tmp_path / "cifar", num_models=6) == 6
    rows = store.rows("models")
    assert {a.name: (a.dtype, a.encoding) for a in rows.schema.arrays} == {
        "masks": ("bool", "bits"),
        "test_margins": ("float16", "plain"),
        "train_margins": ("float16", "plain"),
    }
    stored = np.load(tmp_path / "cifar/data/train_masks_50pct.npy")[:6]
    np.testing.assert_array_equal(rows.read(range(6))["masks"], stored)


def test_which_share_is_asked_if_there_are_several(tmp_path):
    publish(tmp_path, shares=(10, 50))
    with raises(DatamodelsError, "compat.several_fractions", fix="alpha"):
        datamodels.open_published(tmp_path)
    assert datamodels.open_published(tmp_path, alpha=0.1).alpha == 0.1
    with raises(DatamodelsError, "compat.no_published_arrays"):
        datamodels.open_published(tmp_path, alpha=0.2)


def test_weights_are_read_without_running_what_a_file_holds(tmp_path):
    weight = np.arange(6.0).reshape(3, 2)
    datamodels.save_weights(tmp_path / "d.pt", weight, np.zeros(2), np.ones(2))
    weights = datamodels.load_weights(tmp_path / "d.pt")
    np.testing.assert_array_equal(weights["weight"], weight)

    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    torch.save({"weight": Trap()}, tmp_path / "trap.pt")
    with raises(DatamodelsError, "compat.weights_format"):
        datamodels.load_weights(tmp_path / "trap.pt")
    assert not (tmp_path / "sprung").exists()
    torch.save({"weight": torch.ones(2)}, tmp_path / "half.pt")
    with raises(DatamodelsError, "compat.weights_incomplete") as caught:
        datamodels.load_weights(tmp_path / "half.pt")
    assert caught.value.found == "no bias, lam"


def test_a_file_of_another_tool_is_no_regression_data(tmp_path):
    (tmp_path / "ffcv.beton").write_bytes(b"\x02\x00not ours" * 40)
    with raises(DatamodelsError, "compat.regression_format", fix="write_dataset"):
        datamodels.RegressionData.load(tmp_path / "ffcv.beton")


def test_rows_that_are_not_completed_are_left_out_of_the_regression(folder, tmp_path):
    data = datamodels.collect_completed(folder, outputs="margins")
    assert data.rows.tolist() == [0, 3, 4]
    assert data.targets.shape == (3, 6)
    assert datamodels.collect_completed(folder, outputs="margins", column=2).targets.shape == (3, 1)
    assert datamodels.collect_completed(
        folder, outputs="margins", flags=None
    ).rows.tolist() == list(range(5))
    data.save(tmp_path / "data")
    reloaded = datamodels.RegressionData.load(tmp_path / "data")
    np.testing.assert_array_equal(reloaded.masks.bits, data.masks.bits)
    with raises(DatamodelsError, "compat.no_such_array"):
        datamodels.collect_completed(folder, outputs="margin")
    with raises(DatamodelsError, "compat.too_few_models"):
        datamodels.compute_datamodels(data, num_train=3, num_val=1)


def test_few_models_are_fitted_with_l1_as_in_the_original():
    rng = np.random.default_rng(0)
    masks = rng.random((100, 1200)) < 0.5
    weights = np.zeros(1200)
    weights[[3, 500, 1100]] = 1.0, -2.0, 1.5
    targets = (masks @ weights + 0.01 * rng.standard_normal(100)).astype(np.float32)[:, None]
    data = datamodels.RegressionData(gk.datamodels.Masks.of(masks), targets, np.arange(100))
    with pytest.warns(EvidenceWarning):
        fitted = datamodels.compute_datamodels(data, num_train=80, num_val=20)
    unseen = rng.random((200, 1200)) < 0.5
    predicted = unseen @ fitted.weights[:, 0]
    assert np.corrcoef(predicted, unseen @ weights)[0, 1] > 0.95
    assert np.count_nonzero(fitted.weights) < 100

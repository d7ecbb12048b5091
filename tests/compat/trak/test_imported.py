"""Results of the released package, as it lays them out, brought into a store."""

import json

import numpy as np
import pytest
from numpy.lib.format import open_memmap
from raises import raises

import gradkeep as gk
import gradkeep.store as gs
from gradkeep.compat.trak import import_save_dir
from gradkeep.errors import AttributionError

N, M, K = 12, 4, 5


def save_dir(folder, *, done=N, finalized=1):
    generator = np.random.default_rng(0)
    (folder / "0").mkdir(parents=True)
    (folder / "scores").mkdir()
    about = {"JL dimension": K, "JL matrix type": "normal", "train set size": N}
    (folder / "metadata.json").write_text(json.dumps(about))
    state = {"0": {"is_featurized": int(done == N), "is_finalized": finalized}}
    (folder / "id_0.json").write_text(json.dumps(state))
    experiment = {"num_targets": M, "scores_path": "/gone/x.mmap", "scores_finalized": finalized}
    (folder / "experiments.json").write_text(json.dumps({"my test": experiment}))
    arrays = {
        "0/grads": generator.normal(size=(N, K)).astype(np.float16),
        "0/features": generator.normal(size=(N, K)).astype(np.float16),
        "0/out_to_loss": generator.random((N, 1)).astype(np.float16),
        "0/my test_grads": generator.normal(size=(M, K)).astype(np.float16),
        "0/_is_featurized": (np.arange(N) < done).astype(np.int32),
        "scores/my test": generator.normal(size=(N, M)).astype(np.float16),
    }
    for name, values in arrays.items():
        file = open_memmap(folder / f"{name}.mmap", "w+", values.dtype, values.shape)
        file[:] = values
        file.flush()
    return arrays


def test_everything_comes_over(tmp_path):
    arrays = save_dir(tmp_path / "old")
    imported = import_save_dir(tmp_path / "old", tmp_path / "new")
    assert (imported.checkpoints, imported.scores, imported.skipped) == (
        ("id_0",),
        ("my-test",),
        (),
    )
    store = gs.open(tmp_path / "new", create=False)
    train = store.read(gs.CaptureKey("id_0", "train", "trak"))
    assert np.array_equal(train.column("projection"), arrays["0/grads"].astype(np.float32))
    assert np.array_equal(train.column("weight"), arrays["0/out_to_loss"][:, 0].astype(np.float32))
    targets = store.read(gs.CaptureKey("id_0", "my-test", "trak"))
    assert np.array_equal(
        targets.column("projection"), arrays["0/my test_grads"].astype(np.float32)
    )
    scores = gk.Scores.load(store, "my-test")
    assert (scores.method, scores.checkpoints) == ("trak", ("id_0",))
    assert np.array_equal(scores.values, arrays["scores/my test"].T.astype(np.float32))
    second = import_save_dir(tmp_path / "old", store)
    assert second == imported


def test_what_is_incomplete_is_named_and_left(tmp_path):
    save_dir(tmp_path / "old", done=7, finalized=0)
    imported = import_save_dir(tmp_path / "old", tmp_path / "new")
    assert imported.checkpoints == imported.scores == ()
    assert imported.skipped == (
        "model id 0: 7 of 12 rows are featurized",
        "scores my test: not finalized",
    )


def test_what_is_no_save_dir_or_is_cut_off(tmp_path):
    with raises(AttributionError, "compat.no_results"):
        import_save_dir(tmp_path, tmp_path / "new")
    save_dir(tmp_path / "old")
    (tmp_path / "old" / "experiments.json").write_text('{"my te')
    with raises(AttributionError, "compat.not_trak"):
        import_save_dir(tmp_path / "old", tmp_path / "new")


def test_nothing_is_unpickled(tmp_path):
    save_dir(tmp_path / "old")
    np.save(tmp_path / "array.npy", np.array([{"a": 1}], object), allow_pickle=True)
    (tmp_path / "array.npy").rename(tmp_path / "old" / "0" / "grads.mmap")
    with raises(AttributionError, "compat.array_unreadable"):
        import_save_dir(tmp_path / "old", tmp_path / "new")


def test_another_shape_is_refused(tmp_path):
    save_dir(tmp_path / "old")
    np.save(tmp_path / "array.npy", np.zeros((N, K + 1)))
    (tmp_path / "array.npy").rename(tmp_path / "old" / "0" / "grads.mmap")
    with raises(AttributionError, "compat.array_shape"):
        import_save_dir(tmp_path / "old", tmp_path / "new")


@pytest.mark.parametrize("name", ["../../x", "/x", "..", ".x", "a/../../../x", "a\0b", ""])
def test_a_name_never_leads_out_of_the_folder(tmp_path, name):
    save_dir(tmp_path / "old")
    np.save(tmp_path / "x.npy", np.ones((N, M), np.float16))
    for secret in ("x.mmap", "x_grads.mmap"):
        (tmp_path / secret).write_bytes((tmp_path / "x.npy").read_bytes())
    fields = {"num_targets": M, "scores_finalized": 1}
    (tmp_path / "old" / "experiments.json").write_text(json.dumps({name: fields}))
    imported = import_save_dir(tmp_path / "old", tmp_path / "new")
    assert imported.scores == ()
    assert "not the name of a file in this folder" in imported.skipped[0]
    assert gs.open(tmp_path / "new").captures() == [gs.CaptureKey("id_0", "train", "trak")]


@pytest.mark.parametrize("part", ["0", "scores", "0/grads.mmap", "scores/my test.mmap"])
def test_a_link_out_of_the_folder_is_not_read(tmp_path, part):
    save_dir(tmp_path / "old")
    (tmp_path / "old" / part).rename(tmp_path / "away")
    (tmp_path / "old" / part).symlink_to(tmp_path / "away")
    with raises(AttributionError, "compat.link_out"):
        import_save_dir(tmp_path / "old", tmp_path / "new")


@pytest.mark.parametrize("value", [None, "12", -1, 0, 1.5, True, 10**40, [], {}])
@pytest.mark.parametrize("name", ["train set size", "JL dimension"])
def test_odd_sizes_are_refused(tmp_path, name, value):
    save_dir(tmp_path / "old")
    about = {"JL dimension": K, "train set size": N, name: value}
    (tmp_path / "old" / "metadata.json").write_text(json.dumps(about))
    with pytest.raises(AttributionError, match=name):
        import_save_dir(tmp_path / "old", tmp_path / "new")


@pytest.mark.parametrize("text", ["[]", "3", "[" * 100_000, "null"])
def test_what_is_no_object_is_refused(tmp_path, text):
    save_dir(tmp_path / "old")
    (tmp_path / "old" / "experiments.json").write_text(text)
    with pytest.raises(AttributionError):
        import_save_dir(tmp_path / "old", tmp_path / "new")


def test_imported_gradients_can_be_asked(tmp_path):
    arrays = save_dir(tmp_path / "old")
    import_save_dir(tmp_path / "old", tmp_path / "new")
    store = gs.open(tmp_path / "new", create=False)
    train, queries = (arrays[f"0/{name}"].astype(np.float64) for name in ("grads", "my test_grads"))
    weight = arrays["0/out_to_loss"][:, 0].astype(np.float64)
    options = {"queries": "my-test", "run": "trak"}
    dots = gk.attribute(store, method="dot", **options)
    assert np.allclose(dots.values, queries @ (weight[:, None] * train).T, atol=1e-4)
    gradients = gk.gradients(store, split="train", run="trak", of="output")
    assert len(gradients) == N
    for method in ("cos", "self", "kernel", "trak"):
        assert np.isfinite(gk.attribute(store, method=method, **options).values).all()
    assert gk.store.verify(store).healthy

"""What the released package loses, mixes or crashes on, case by case."""

import importlib
import inspect
import json
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import quickstart
import torch
from raises import raises
from torch import nn

from gradkeep.compat import trak
from gradkeep.compat.trak import TRAKer, _features, utils
from gradkeep.compat.trak import test_install as smoke
from gradkeep.compat.trak.projectors import (
    BasicProjector,
    BasicSingleBlockProjector,
    ChunkedCudaProjector,
    CudaProjector,
    NoOpProjector,
    ProjectionType,
    SketchProjector,
)
from gradkeep.compat.trak.savers import ModelIDException
from gradkeep.errors import AttributionError, DamagedError, GradkeepError

N, M, D, C = 40, 6, 5, 3


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, C))


def data(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, D, generator=generator),
        torch.randint(C, (count,), generator=generator),
    )


TRAIN, TEST = data(N), data(M, 2)


def traker(folder, model=None, **options):
    options = {"proj_dim": 16, "device": "cpu", "logging_level": logging.ERROR} | options
    model = network() if model is None else model
    return TRAKer(model, "image_classification", N, folder, **options)


def cut(batch, rows):
    return [field[rows] for field in batch]


def featurize(t, model=None, model_id=0, step=10, **options):
    t.load_checkpoint((t.model if model is None else model).state_dict(), model_id, **options)
    for start in range(0, N, step):
        part = cut(TRAIN, slice(start, start + step))
        t.featurize(part, num_samples=len(part[0]))


def score(t, name="test", model=None, model_id=0, targets=M):
    state = (t.model if model is None else model).state_dict()
    t.start_scoring_checkpoint(name, state, model_id, targets)
    t.score(cut(TEST, slice(0, 4)), num_samples=4)
    t.score(cut(TEST, slice(4, 6)), num_samples=2)


def whole(folder, model_ids=(0,), **options):
    t = traker(folder, **options)
    for model_id in model_ids:
        featurize(t, network(model_id), model_id)
    t.finalize_features()
    for model_id in model_ids:
        score(t, model=network(model_id), model_id=model_id)
    return t


def close(one, other, tolerance=2e-4):
    one, other = np.asarray(one), np.asarray(other)
    assert np.abs(other).max() > 0
    assert np.allclose(one, other, atol=tolerance * np.abs(other).max())


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    t = whole(tmp_path_factory.mktemp("expected"), use_half_precision=False)
    return np.array(t.finalize_scores("test"))


# Silent loss or corruption in the released package.


def test_finalized_scores_stay_until_new_ones_are_committed(tmp_path):
    t = whole(tmp_path)
    first = np.array(t.finalize_scores("test"))
    featurize(t, network(1), 1)
    t.finalize_features(model_ids=[1])
    t.start_scoring_checkpoint("test", network(1).state_dict(), 1, M)
    path = tmp_path / "scores" / "test.mmap"
    assert np.array_equal(np.load(path), first)
    assert t.saver.experiments["test"]["scores_finalized"] == 1
    t.score(TEST, num_samples=M)
    second = np.array(t.finalize_scores("test"))
    assert np.array_equal(np.load(path), second)
    assert not np.array_equal(first, second)


def test_an_existing_id_is_not_wiped(tmp_path):
    featurize(traker(tmp_path))
    reopened = traker(tmp_path, load_from_save_dir=False)
    with pytest.raises(ModelIDException, match="_allow_featurizing_already_registered"):
        reopened.load_checkpoint(reopened.model.state_dict(), 0)
    assert traker(tmp_path).saver.model_ids == {0: {"is_featurized": 1, "is_finalized": 0}}
    other = network(5)
    reopened.load_checkpoint(other.state_dict(), 0, _allow_featurizing_already_registered=True)
    assert traker(tmp_path).saver.model_ids == {0: {"is_featurized": 0, "is_finalized": 0}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": network(9)}, "weights"),
        ({"model": nn.Linear(D, C)}, "parameters"),
        ({"projector_seed": 1}, "seed"),
        ({"grad_wrt": ["2.weight"]}, "grad_wrt"),
        ({"use_half_precision": False}, "float16"),
        (
            {"projector": BasicProjector(66, 16, 0, "normal")},
            "matrix type: stored 'sjlt', requested 'normal'",
        ),
    ],
)
def test_rows_of_different_origin_are_not_mixed(tmp_path, change, words):
    t = traker(tmp_path)
    t.load_checkpoint(t.model.state_dict(), 0)
    t.featurize(cut(TRAIN, slice(0, 10)), num_samples=10)

    def begin():
        other = traker(tmp_path, **change)
        other.load_checkpoint(other.model.state_dict(), 0)

    with pytest.raises((ModelIDException, AttributionError), match=words):
        begin()
    assert int(traker(tmp_path).saver.sets.model(0).done.sum()) == 10


def test_scoring_with_other_weights_is_refused(tmp_path):
    t = traker(tmp_path)
    featurize(t)
    t.finalize_features()
    with pytest.raises(ModelIDException, match="weights"):
        t.start_scoring_checkpoint("test", network(3).state_dict(), 0, M)


def test_another_number_of_targets_is_refused(tmp_path):
    t = whole(tmp_path)
    with pytest.raises(AttributionError, match="num_targets: stored '6', requested '20'"):
        t.start_scoring_checkpoint("test", t.model.state_dict(), 0, 20)


@pytest.mark.parametrize("inds", [[3], [0, 1, 2, 3, 4]])
def test_as_many_inds_as_samples(tmp_path, inds):
    t = traker(tmp_path)
    t.load_checkpoint(t.model.state_dict(), 0)
    with pytest.raises(ValueError, match="inds for a batch of 4"):
        t.featurize(cut(TRAIN, slice(0, 4)), inds=inds)
    assert not t.saver.done().any()


def test_targets_that_were_not_scored_are_named(tmp_path):
    t = traker(tmp_path)
    featurize(t)
    t.finalize_features()
    t.start_scoring_checkpoint("test", t.model.state_dict(), 0, M)
    t.score(cut(TEST, [0, 2, 3]), inds=[0, 2, 3])
    with pytest.raises(AttributionError, match="no gradients of targets 1, 4, 5"):
        t.finalize_scores("test")
    assert not (tmp_path / "scores" / "test.mmap").exists()


def test_without_a_finalized_id_there_are_no_scores(tmp_path):
    t = whole(tmp_path)
    t.saver.store.rows("trak.id_0.final")
    folder = tmp_path / "store" / "datamodels" / "trak.id_0.final" / "rows"
    for file in folder.rglob("*.*"):
        file.unlink()
    with pytest.raises(ModelIDException, match="nothing to average"):
        t.finalize_scores("test")
    assert not (tmp_path / "scores" / "test.mmap").exists()


def test_more_numbers_than_rows_need_a_ridge(tmp_path, expected):
    t = traker(tmp_path, proj_dim=N, lambda_reg=0.0)
    featurize(t)
    with raises(AttributionError, "compat.too_few_rows", fix="Remove lambda_reg"):
        t.finalize_features()
    assert t.saver.model_ids[0]["is_finalized"] == 0
    t.finalize_features(lambda_reg=None)
    score(t)
    assert np.isfinite(t.finalize_scores("test")).all()


def test_a_matrix_larger_than_memory_is_refused():
    class Wide:
        count, dim = 10, 1 << 20

    with pytest.raises(AttributionError, match=r"1048576 x 1048576 matrix .* does not fit"):
        _features.add_scores(None, Wide(), Wide(), _features.Ridge(1.0), share=1.0)


def test_a_singular_matrix_without_a_ridge_is_refused(tmp_path):
    t = traker(tmp_path, proj_dim=30, lambda_reg=0.0, grad_wrt=["2.bias"])
    featurize(t)
    with raises(AttributionError, "compat.singular") as caught:
        t.finalize_features()
    assert "of rank 3" in caught.value.found
    assert t.saver.model_ids[0]["is_finalized"] == 0


def test_writers_of_experiments_do_not_overwrite_each_other(tmp_path):
    t = whole(tmp_path)
    other = traker(tmp_path)
    t.start_scoring_checkpoint("one", t.model.state_dict(), 0, M)
    other.start_scoring_checkpoint("two", t.model.state_dict(), 0, M)
    assert set(traker(tmp_path).saver.experiments) == {"test", "one", "two"}


def test_a_store_below_another_is_not_seen(tmp_path):
    featurize(traker(tmp_path / "inner"), network(3), 7)
    t = traker(tmp_path)
    assert t.saver.model_ids == {}


@pytest.mark.parametrize("kind", [BasicProjector, BasicSingleBlockProjector, CudaProjector])
def test_no_two_ids_share_a_part_of_their_matrix(kind):
    x = torch.randn(1, 50)
    one, other = (
        kind(50, 2000, 0, ProjectionType.rademacher, "cpu").project(x, model_id)
        for model_id in (0, 1)
    )
    assert float((one == other).float().mean()) < 0.1
    blocks = [
        BasicProjector(50, 300, 0, "normal", "cpu", block_size=size).project(x, 0)
        for size in (7, 100, 300)
    ]
    assert torch.equal(blocks[0], blocks[1])
    assert torch.equal(blocks[0], blocks[2])


def test_chunks_of_one_seed_get_different_matrices():
    parts = [CudaProjector(50, 64, 0, "rademacher", "cpu") for _ in range(2)]
    chunked = ChunkedCudaProjector(parts, 50, [50, 50], 8, "cpu", torch.float32)
    x = torch.randn(3, 50)
    apart = chunked.project(torch.cat([x, -x], 1), 0)
    assert float(apart.norm()) > 1  # one matrix for both would give zero
    named = {"a": x, "b": -x}
    assert torch.equal(chunked.project(named, 0), apart)


def test_scoring_an_id_that_is_not_finalized_raises(tmp_path):
    t = traker(tmp_path)
    featurize(t)
    t.start_scoring_checkpoint("test", t.model.state_dict(), 0, M)
    with pytest.raises(ModelIDException, match="not finalized"):
        t.score(TEST, num_samples=M)


def test_a_flipped_byte_is_noticed(tmp_path):
    t = whole(tmp_path)
    assert t.saver.store.durability == "full"
    t.finalize_scores("test")
    file = next((tmp_path / "store" / "datamodels" / "trak.id_0.train" / "rows").rglob("0.*"))
    damaged = bytearray(file.read_bytes())
    damaged[-9] ^= 1
    file.chmod(0o644)
    file.write_bytes(damaged)
    with pytest.raises(DamagedError):
        traker(tmp_path).finalize_scores("test")
    path = tmp_path / "scores" / "test.mmap"
    bytes_ = bytearray(path.read_bytes())
    bytes_[-1] ^= 1
    path.write_bytes(bytes_)
    with pytest.raises(DamagedError, match="differ from what was written"):
        t.saver.scores("test")


# Crashes of the released package.


@pytest.mark.parametrize("projector", [None, BasicProjector(66, 8, 0, "normal", "cpu")])
def test_few_dimensions_and_finalizing_twice(tmp_path, projector, caplog):
    t = traker(tmp_path, proj_dim=8, projector=projector, logging_level=logging.WARNING)
    featurize(t)
    t.finalize_features()
    t.finalize_features()
    assert "already finalized" in caplog.text
    score(t)
    assert t.finalize_scores("test").shape == (N, M)


@pytest.mark.parametrize("half", [True, False])
def test_other_batch_boundaries_on_resuming(tmp_path, expected, half):
    t = traker(tmp_path, use_half_precision=half)
    t.load_checkpoint(t.model.state_dict(), 0)
    t.featurize(cut(TRAIN, slice(0, 10)), num_samples=10)
    reopened = traker(tmp_path, use_half_precision=half)
    reopened.load_checkpoint(reopened.model.state_dict(), 0)
    calls = []
    reopened._gradients = lambda batch, inner=reopened._gradients: (
        calls.append(len(batch[0])),
        inner(batch),
    )[1]
    for start in range(0, N, 7):
        part = cut(TRAIN, slice(start, start + 7))
        reopened.featurize(part, num_samples=len(part[0]))
    assert sum(calls) == N - 10
    reopened.finalize_features()
    score(reopened)
    close(reopened.finalize_scores("test"), expected, 2e-3 if half else 2e-4)


def test_allow_skip_skips(tmp_path, expected, caplog):
    t = traker(tmp_path, use_half_precision=False, logging_level=logging.WARNING)
    for model_id in (0, 1, 2):
        featurize(t, network(model_id), model_id)
    t.finalize_features([0, 1])
    score(t, model=network(0))
    with pytest.raises(AttributionError, match="model id 1"):
        t.finalize_scores("test")
    with pytest.raises(ModelIDException, match="2 not finalized"):
        t.finalize_scores("test", model_ids=[0, 2])
    close(t.finalize_scores("test", allow_skip=True), expected)
    assert "Model ID 1 skipped" in caplog.text
    assert "Model ID 2 not finalized" in caplog.text


def test_a_fresh_directory_without_loading_from_it(tmp_path):
    t = whole(tmp_path / "new", load_from_save_dir=False)
    assert t.finalize_scores("test").shape == (N, M)


def test_a_damaged_document_is_a_clear_error(tmp_path):
    featurize(traker(tmp_path))
    file = tmp_path / "store" / "datamodels" / "trak.id_0.train" / "schema.json"
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(DamagedError, match=r"schema\.json"):
        traker(tmp_path)


def test_devices_and_numbers_of_any_kind(tmp_path, expected):
    t = traker(
        tmp_path,
        device=torch.device("cpu"),
        projector_seed=np.int64(0),
        use_half_precision=False,
    )
    t.load_checkpoint(t.model.state_dict(), np.int64(0))
    t.featurize(cut(TRAIN, slice(0, 20)), inds=list(range(20)))
    t.featurize(cut(TRAIN, slice(20, 30)), inds=torch.arange(20, 30))
    t.featurize(cut(TRAIN, slice(30, 40)), inds=np.arange(30, 40, dtype=np.uint8)[:, None])
    t.finalize_features()
    score(t)
    close(t.finalize_scores("test"), expected)
    with pytest.raises(TypeError, match="'zero'"):
        t.load_checkpoint(t.model.state_dict(), "zero")
    with pytest.raises(TypeError, match="integers"):
        t.featurize(TRAIN, inds=np.arange(N) / 2)


def test_without_a_cuda_device_the_cpu_is_used(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    t = traker(tmp_path, device="cuda")
    assert t.device == torch.device("cpu")
    smoke()
    smoke(use_fast_jl=False)


def test_names_that_cannot_be(tmp_path):
    t = traker(tmp_path)
    with pytest.raises(ValueError, match="a/b"):
        t.start_scoring_checkpoint("a/b", t.model.state_dict(), 0, M)
    with pytest.raises(ValueError, match="image_classification, clip"):
        TRAKer(network(), "vision", N, tmp_path / "b", device="cpu")
    with pytest.raises(ValueError, match=r"2\.weight"):
        traker(tmp_path / "c", grad_wrt=["2.wieght"])


def test_the_nominal_size_of_a_last_short_batch(tmp_path, expected):
    t = traker(tmp_path, use_half_precision=False)
    t.load_checkpoint(t.model.state_dict(), 0)
    for start in range(0, N, 16):
        t.featurize(cut(TRAIN, slice(start, start + 16)), num_samples=16)
    assert t.saver.done().all()
    with pytest.raises(ValueError, match="there are 40"):
        t.featurize(cut(TRAIN, slice(0, 3)), num_samples=3)
    with pytest.raises(ValueError, match="has 5 samples"):
        t.featurize(cut(TRAIN, slice(0, 5)), num_samples=3)
    with pytest.raises(ValueError, match="same row twice"):
        t.featurize(cut(TRAIN, [0, 0]), inds=[0, 0])
    t.finalize_features()
    score(t)
    close(t.finalize_scores("test"), expected)


def test_gradients_as_they_are_in_half_precision(tmp_path):
    t = whole(tmp_path, projector=NoOpProjector(), lambda_reg=1e-3)
    assert t.proj_dim == t.num_params == 66
    scores = t.finalize_scores("test")
    assert np.isfinite(scores).all()
    assert np.abs(scores).max() > 0


# What is to be kept.


def test_featurizing_before_loading_raises(tmp_path):
    with pytest.raises(AssertionError, match="Load a checkpoint using traker"):
        traker(tmp_path).featurize(TRAIN, num_samples=N)
    t = traker(tmp_path)
    t.load_checkpoint(t.model.state_dict(), 0)
    for options in ({}, {"inds": [0], "num_samples": 1}):
        with pytest.raises(AssertionError, match="Exactly one"):
            t.featurize(TRAIN, **options)


def test_another_dimension_or_size_raises(tmp_path):
    traker(tmp_path)
    with pytest.raises(AttributionError, match="JL dimension: stored '16', requested '32'"):
        traker(tmp_path, proj_dim=32)
    with pytest.raises(AttributionError, match="train set size"):
        TRAKer(network(), "image_classification", N + 1, tmp_path, device="cpu", proj_dim=16)


def test_what_is_not_ready_cannot_be_finalized(tmp_path):
    t = traker(tmp_path)
    t.load_checkpoint(t.model.state_dict(), 0)
    with pytest.raises(ModelIDException, match="not fully featurized"):
        t.finalize_features()
    with pytest.raises(ModelIDException, match="not registered"):
        t.finalize_features([5])
    with pytest.raises(ValueError, match="does not exist"):
        t.finalize_scores("nothing")
    with pytest.raises(ModelIDException, match="cannot start scoring"):
        t.start_scoring_checkpoint("test", t.model.state_dict(), 3, M)


def test_deleted_gradients_and_another_ridge(tmp_path, expected):
    t = traker(tmp_path, use_half_precision=False)
    featurize(t)
    t.finalize_features(del_grads=True)
    assert not list((tmp_path / "store" / "datamodels" / "trak.id_0.train").rglob("*/0.*"))
    score(t)
    close(t.finalize_scores("test"), expected)
    reopened = traker(tmp_path, use_half_precision=False)
    reopened.load_checkpoint(reopened.model.state_dict(), 0)
    reopened.featurize(TRAIN, num_samples=N)  # nothing left to do
    close(reopened.finalize_scores("test"), expected)
    with pytest.raises(ModelIDException, match="deleted"):
        reopened.finalize_features(lambda_reg=3.0)


def test_finalizing_again_with_another_ridge(tmp_path, expected):
    t = whole(tmp_path, use_half_precision=False)
    close(t.finalize_scores("test"), expected)
    t.finalize_features(lambda_reg=5.0)
    other = np.array(t.finalize_scores("test"))
    assert not np.allclose(other, expected)
    t.finalize_features(lambda_reg=None)
    close(t.finalize_scores("test"), expected)


def test_the_current_arrays_have_their_names(tmp_path):
    t = whole(tmp_path, use_half_precision=False)
    scores = t.finalize_scores("test")
    store = t.saver.current_store
    assert set(store) == {
        *("grads", "out_to_loss", "features", "is_featurized"),
        *("test_grads", "test_scores"),
    }
    assert store["grads"].shape == store["features"].shape == (N, 16)
    assert store["out_to_loss"].shape == store["is_featurized"].shape == (N, 1)
    by_hand = store["features"] @ store["test_grads"].T * store["out_to_loss"]
    close(by_hand, scores)
    assert np.array_equal(store["test_scores"], scores)
    assert isinstance(scores, np.memmap)
    assert t.scores is scores


def test_a_moved_directory_keeps_its_scores(tmp_path):
    whole(tmp_path / "before").finalize_scores("test")
    (tmp_path / "before").rename(tmp_path / "after")
    t = traker(tmp_path / "after")
    assert t.saver.experiments["test"]["scores_path"] == str(tmp_path / "after/scores/test.mmap")
    t.saver.scores("test")


def test_results_of_the_released_package_are_not_written_into(tmp_path):
    (tmp_path / "metadata.json").write_text(json.dumps({"JL dimension": 16}))
    with raises(AttributionError, "compat.released_results", fix="import_save_dir"):
        traker(tmp_path)


def test_not_a_number_is_not_kept(tmp_path):
    t = traker(tmp_path)
    t.load_checkpoint(t.model.state_dict(), 0)
    x, y = cut(TRAIN, slice(0, 4))
    x = x.clone()
    x[2] = torch.nan
    with pytest.raises((ValueError, GradkeepError), match="not a number"):
        t.featurize((x, y), num_samples=4)
    assert not t.saver.done().any()


def test_scores_as_everything_else_reads_them(tmp_path):
    t = whole(tmp_path)
    released = np.array(t.finalize_scores("test"))
    scores = t.as_scores("test")
    assert np.array_equal(scores.values, released.T)
    assert scores.top(3, query=2).ids.tolist() == np.argsort(-released[:, 2])[:3].tolist()


def stage(name, folder, *more):
    """A process of its own that runs one stage of a script."""
    script = str(Path(__file__).with_name("quickstart.py"))
    command = [sys.executable, script, name, str(folder), *map(str, more)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def codes(*processes):
    """The exit codes, once all have ended."""
    for process in processes:
        process.communicate(timeout=100)
    return [process.returncode for process in processes]


def killed_after(lines, process):
    for _ in range(lines):
        assert process.stdout.readline()
    process.kill()
    assert codes(process) == [-9]


def test_separate_processes_killed_and_resumed_give_the_same_scores(tmp_path):
    """Train, featurize, finalize and score in processes of their own; the long ones are killed."""
    one, other = tmp_path / "whole", tmp_path / "killed"
    quickstart.main(["train", str(tmp_path)])
    quickstart.main(["featurize,finalize,score,gather", str(tmp_path), str(one), "10"])
    killed_after(2, stage("featurize", tmp_path, other, 7))
    # Two processes share the rest, with other boundaries; each opens the folder normally.
    both = [stage("shard", tmp_path, other, 4, rank) for rank in (0, 1)]
    assert codes(*both) == [0, 0]
    killed_after(1, stage("finalize,score", tmp_path, other, 1))
    assert codes(stage("score,gather", tmp_path, other, 4)) == [0]
    expected = np.load(one / "scores" / "quickstart.mmap")
    assert expected.shape == (40, 6)
    close(np.load(other / "scores" / "quickstart.mmap"), expected)


NAMES = {
    "": "TRAKer test_install __version__ VERSION",
    "projectors": "ProjectionType AbstractProjector NoOpProjector BasicSingleBlockProjector "
    "BasicProjector CudaProjector ChunkedCudaProjector",
    "modelout_functions": "AbstractModelOutput ImageClassificationModelOutput CLIPModelOutput "
    "TextClassificationModelOutput IterativeImageClassificationModelOutput TASK_TO_MODELOUT",
    "gradient_computers": "AbstractGradientComputer FunctionalGradientComputer "
    "IterativeGradientComputer",
    "score_computers": "AbstractScoreComputer BasicSingleBlockScoreComputer BasicScoreComputer",
    "savers": "AbstractSaver MmapSaver ModelIDException",
    "traker": "TRAKer",
    "utils": "test_install parameters_to_vector get_num_params is_not_buffer vectorize "
    "get_matrix_mult get_parameter_chunk_sizes",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_are_where_scripts_look_for_them(name):
    module = importlib.import_module(f"gradkeep.compat.trak{name and '.'}{name}")
    assert [part for part in NAMES[name].split() if not hasattr(module, part)] == []


def test_signatures_are_those_of_the_released_package():
    def arguments(function):
        return " ".join(inspect.signature(function).parameters)

    assert arguments(TRAKer) == (
        "model task train_set_size save_dir load_from_save_dir device gradient_computer projector "
        "saver score_computer proj_dim logging_level use_half_precision proj_max_batch_size "
        "projector_seed grad_wrt lambda_reg"
    )
    methods = {
        TRAKer.load_checkpoint: "checkpoint model_id _allow_featurizing_already_registered",
        TRAKer.featurize: "batch inds num_samples",
        TRAKer.start_scoring_checkpoint: "exp_name checkpoint model_id num_targets",
        TRAKer.score: "batch inds num_samples",
        TRAKer.finalize_scores: "exp_name model_ids allow_skip",
    }
    for method, expected_names in methods.items():
        assert arguments(method) == f"self {expected_names}"
    assert arguments(TRAKer.finalize_features).startswith("self model_ids del_grads ")
    assert trak.VERSION == trak.__version__ == "0.3.2"


def test_small_functions_do_what_they_did():
    model = nn.Linear(3, 2)
    named = {"a": torch.ones(2, 3, 2), "b": torch.zeros(2)}
    assert utils.get_num_params(model) == 8
    assert utils.parameters_to_vector(model.parameters()).shape == (8,)
    assert utils.vectorize(named).shape == (2, 7)
    assert torch.equal(utils.vectorize(named, torch.empty(2, 7)), utils.vectorize(named))
    assert utils.is_not_buffer(0, ["fc.weight"])
    assert not utils.is_not_buffer(0, ["bn.running_mean"])
    half = torch.full((1, 70_000), 1.0).half()
    assert float(utils.get_matrix_mult(half, half, torch.float32)) == 70_000
    assert utils.get_parameter_chunk_sizes(model, 1) == (2**32 - 1, [8])
    assert utils.get_parameter_chunk_sizes(model, 2**32 // 7) == (7, [6, 2])
    assert SketchProjector(66, 16).project({"w": torch.ones(2, 66)}, 0).shape == (2, 16)
    assert SketchProjector(66, 16).project(torch.ones(2, 66), 0).shape == (2, 16)
    with pytest.raises(ValueError, match="normal or rademacher"):
        BasicProjector(66, 16, 0, "sparse")


def test_the_default_ridge_is_told_once_per_process(tmp_path, caplog):
    from gradkeep.compat.trak import traker

    traker._warn_default_ridge.cache_clear()
    model = torch.nn.Linear(3, 2)
    for name, ridge in (("a", 1.0), ("b", None), ("c", None)):
        TRAKer(model, "image_classification", 4, tmp_path / name, device="cpu", lambda_reg=ridge)
    warnings = [record for record in caplog.records if "lambda_reg" in record.message]
    assert len(warnings) == 1

"""Scores: kept, found again, ranked, combined, told to other libraries."""

import json

import numpy as np
import pytest
import torch
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep.attribution._question import ScoreAccumulator
from gradkeep.errors import AttributionError, SchemaMismatchError, StoreError
from gradkeep.store import ScoresKey


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    torch.manual_seed(0)
    actual = gk.open(tmp_path_factory.mktemp("store"))
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    states = {n: {k: torch.randn_like(v) for k, v in net.state_dict().items()} for n in "abc"}
    for split, rows in (("train", 11), ("test", 7)):
        batch = (torch.randn(rows, 4), torch.arange(rows) % 3)
        gk.capture(
            actual,
            net,
            [batch],
            task=gk.Classification(),
            split=split,
            checkpoints=states,
            progress=False,
        )
    return actual


def same(one, other):
    for part in ("values", "query_ids", "train_ids", "query_labels", "train_labels"):
        assert np.array_equal(getattr(one, part), getattr(other, part)), part
    for part in ("method", "queries", "train", "checkpoints", "layers", "scale", "exact"):
        assert getattr(one, part) == getattr(other, part), part
    assert json.loads(one.options) == json.loads(other.options)


def test_saved_scores_come_back_as_they_were(store):
    scores = gk.attribute(store, per_layer=True, save="first")
    actual = gk.Scores.load(store, "first")
    same(scores, actual)
    assert np.array_equal(scores.per_layer, actual.per_layer)
    assert np.array_equal(scores.confidence, actual.confidence)
    assert actual.train_labels.tolist() == [n % 3 for n in range(11)]
    plain = gk.attribute(store, method="dot", checkpoints="a")
    plain.save("second")
    same(plain, gk.Scores.load(store, "second"))
    assert gk.Scores.load(store, "second").confidence is None


def test_single_queries_of_saved_scores_are_read_alone(store):
    scores = gk.attribute(store, per_layer=True, save="whole")
    ids = scores.query_ids[[2, 0]]
    actual = gk.Scores.load(store, "whole", ids=ids)
    assert np.array_equal(actual.query_ids, ids)
    assert np.array_equal(actual.values, scores.values[[2, 0]])
    assert np.array_equal(actual.per_layer, scores.per_layer[:, [2, 0]])
    assert np.array_equal(actual.confidence, scores.confidence[[2, 0]])
    assert np.array_equal(actual.query_labels, scores.query_labels[[2, 0]])
    with raises(AttributionError, "attribute.unknown_query"):
        gk.Scores.load(store, "whole", ids=[10**6])


def test_saving_again_is_free_and_other_scores_are_refused(store):
    scores = gk.attribute(store, save="kept")
    scores.save("kept")
    with pytest.raises(SchemaMismatchError, match="digest"):
        gk.attribute(store, damping=3.0, save="kept")
    with raises(AttributionError, "attribute.name_taken"):
        gk.attribute(store, method="trak", save="kept")
    with raises(AttributionError, "attribute.name_taken"):
        gk.attribute(store, checkpoints="a", save="kept")
    same(scores, gk.Scores.load(store, "kept"))


def test_scores_that_are_not_there_are_told(store):
    gk.attribute(store, save="there")
    with pytest.raises(AttributionError, match="there"):
        gk.Scores.load(store, "missing")
    unfinished = gk.store.Schema(
        (gk.store.Array("score", shape=(2,), kind="data"),), num_rows=3, rows_per_segment=1
    )
    writer = store.write(gk.store.ScoresKey("half"), unfinished)
    writer.append([0], {"score": [[1.0, 2.0]]})
    writer.close()
    with raises(AttributionError, "attribute.incomplete_scores"):
        gk.Scores.load(store, "half")


def test_scores_larger_than_the_budget_are_made_on_disk(store, monkeypatch):
    whole = gk.attribute(store, method="tracin", lrs=[1, 2, 3])
    accumulator = ScoreAccumulator((7, 11), checkpoints=3, over="sum", memory_budget=100)
    assert isinstance(accumulator.values, np.memmap)
    monkeypatch.setattr("gradkeep.attribution._question.IN_MEMORY", 64)
    monkeypatch.setattr("gradkeep.attribution._attribute._TILE", 100)
    scores = gk.attribute(store, method="tracin", lrs=[1, 2, 3])
    assert isinstance(scores.values, np.memmap)
    assert np.allclose(scores.values, whole.values, rtol=1e-5)
    scores.save("large")
    monkeypatch.setattr("gradkeep.attribution._question.IN_MEMORY", 64)
    assert np.array_equal(gk.Scores.load(store, "large").values, scores.values)


def test_confidence_is_the_reliability_of_the_mean(store):
    scores = gk.attribute(store)
    parts = [gk.attribute(store, checkpoints=name).values for name in "abc"]
    for query in range(7):
        pairs = [
            np.corrcoef(parts[a][query], parts[b][query])[0, 1] for a, b in ((0, 1), (0, 2), (1, 2))
        ]
        r = np.mean(pairs)
        expected = max(0.0, 3 * r / (1 + 2 * r)) if r > 0 else 0.0
        # Weights are pooled over all checkpoints in one and not in the other.
        assert abs(scores.confidence[query] - expected) < 0.25
    alike = ScoreAccumulator((1, 5), checkpoints=2, over="mean", memory_budget=None)
    for _ in range(2):
        alike.add(0, torch.arange(5.0).unsqueeze(0))
    assert alike.confidence()[0] == pytest.approx(1.0, abs=1e-6)
    against = ScoreAccumulator((1, 5), checkpoints=2, over="mean", memory_budget=None)
    for sign in (1, -1):
        against.add(0, sign * torch.arange(5.0).unsqueeze(0))
    assert against.confidence()[0] == 0


def test_confidence_of_products_is_exact(store):
    scores = gk.attribute(store, method="tracin", lrs=[1, 1, 1])
    parts = [gk.attribute(store, method="dot", checkpoints=name).values for name in "abc"]
    for query in range(7):
        pairs = [
            np.corrcoef(parts[a][query], parts[b][query])[0, 1] for a, b in ((0, 1), (0, 2), (1, 2))
        ]
        r = float(np.mean(pairs))
        expected = 3 * r / (1 + 2 * r) if r > 0 else 0.0
        assert scores.confidence[query] == pytest.approx(expected, abs=1e-4)


def test_ranks_count_from_the_most_helpful(store):
    scores = gk.attribute(store)
    places = scores.rank(query=2)
    assert sorted(places.tolist()) == list(range(1, 12))
    assert scores.train_ids[places == 1][0] == scores.top(1, query=2).ids[0]
    assert scores.train_ids[places == 11][0] == scores.bottom(1, query=2).ids[0]


def test_ensembles(store):
    one = gk.attribute(store)
    other = gk.attribute(store, method="trak")
    mean = gk.combine([one, other])
    row = [(s.values[3] - s.values[3].mean()) / s.values[3].std() for s in (one, other)]
    assert np.allclose(mean.values[3], np.mean(row, 0), atol=1e-5)
    borda = gk.combine([one, other], how="borda")
    places = [np.argsort(np.argsort(s.values[3])) for s in (one, other)]
    assert np.allclose(borda.values[3], np.mean(places, 0) / 5 - 1, atol=1e-6)
    assert borda.method == "borda of kernel, trak"
    with pytest.raises(AttributionError, match="different query ids"):
        gk.combine([one, gk.attribute(store, ids=[1, 2])])
    with raises(AttributionError, "attribute.nothing_to_combine"):
        gk.combine([])


def test_tables_hold_every_score(store):
    scores = gk.attribute(store)
    frame = scores.to_pandas()
    assert frame.loc[3, 7] == scores.values[3, 7]
    assert frame.shape == (7, 11)
    table = scores.to_arrow()
    assert table.num_rows == 77
    best = scores.to_arrow(k=2).to_pylist()
    assert [row["train"] for row in best[:2]] == scores.top(2, query=0).ids.tolist()
    assert best[0]["score"] == scores.top(1, query=0).values[0]


def test_the_picture_shows_both_sides(store):
    scores = gk.attribute(store)
    figure = scores.plot(query=5, k=3)
    axes = figure.axes[0]
    assert [bar.get_width() for bar in axes.patches] == [
        *scores.top(3, query=5).values.tolist(),
        *scores.bottom(3, query=5).values[::-1].tolist(),
    ]
    assert "positive helped" in axes.get_xlabel()


def test_several_runs_are_averaged(store, tmp_path):
    torch.manual_seed(5)
    computed, net = gk.open(tmp_path), nn.Linear(3, 2)
    for run in ("r0", "r1"):
        state = {k: torch.randn_like(v) for k, v in net.state_dict().items()}
        for split, rows in (("train", 6), ("test", 2)):
            batch = (torch.arange(3.0 * rows).reshape(rows, 3).sin(), torch.arange(rows) % 2)
            gk.capture(
                computed,
                net,
                [batch],
                task=gk.Classification(),
                split=split,
                run=run,
                checkpoints={"final": state},
                progress=False,
            )
    both = gk.attribute(computed, method="kernel", weight="none", run=["r0", "r1"])
    assert both.checkpoints == ("r0/final", "r1/final")
    ones = [gk.attribute(computed, method="tracin", lrs=[1.0], run=run) for run in ("r0", "r1")]
    summed = gk.attribute(computed, method="tracin", lrs=[1.0, 1.0], run=["r0", "r1"])
    assert np.allclose(summed.values, ones[0].values + ones[1].values, rtol=1e-4, atol=1e-6)


def test_captures_of_different_rows_are_refused(tmp_path):
    computed, net = gk.open(tmp_path), nn.Linear(3, 2)
    for name, rows in (("early", 6), ("late", 5)):
        state = {k: torch.randn_like(v) for k, v in net.state_dict().items()}
        for split in ("train", "test"):
            batch = (torch.randn(rows, 3), torch.arange(rows) % 2)
            gk.capture(
                computed,
                net,
                [batch],
                task=gk.Classification(),
                split=split,
                checkpoints={name: state},
                progress=False,
            )
    with raises(AttributionError, "attribute.different_rows"):
        gk.attribute(computed)
    assert gk.attribute(computed, checkpoints="late").shape == (5, 5)


def names(store):
    return {key.name for key in store.scores()}


def test_deleted_scores_leave_their_name_free(store):
    others = names(store)
    gk.attribute(store, method="dot", checkpoints="a", save="gone")
    store.delete(ScoresKey("gone"))
    assert names(store) == others
    gk.attribute(store, method="cos", checkpoints="a", ids=[0], save="gone")
    assert gk.Scores.load(store, "gone").method == "cos"


def test_what_a_killed_delete_left_is_deleted_by_the_name_of_the_scores(store, monkeypatch):
    others = names(store)
    gk.attribute(store, method="dot", checkpoints="a", save="halfway")
    deleted = store.backend.delete

    def killed(keys, *, durability):
        if any(".train" in key for key in keys):
            raise KeyboardInterrupt
        return deleted(keys, durability=durability)

    with monkeypatch.context() as patch:
        patch.setattr(store.backend, "delete", killed)
        with pytest.raises(KeyboardInterrupt):
            store.delete(ScoresKey("halfway"))
    assert names(store) - others == {"halfway.train"}
    store.delete(ScoresKey("halfway"))
    assert names(store) == others
    with raises(StoreError, "store.no_such_block"):
        store.delete(ScoresKey("halfway"))


def test_a_name_that_could_not_be_read_back_is_refused(store):
    with raises(AttributionError, "attribute.invalid_name", fix="another name"):
        gk.attribute(store, method="dot", checkpoints="a", save="unread.train")
    assert "unread.train" not in names(store)

"""Evaluations in a store: what is saved comes back, and the store knows them."""

import numpy as np
import pytest
from raises import raises

import gradkeep as gk
from gradkeep import evaluate
from gradkeep.errors import EvaluationError
from gradkeep.store import EvaluationKey, verify


@pytest.fixture
def result():
    rng = np.random.default_rng(0)
    return evaluate.label_detection(rng.standard_normal(200), rng.random(200) < 0.1)


def test_an_evaluation_comes_back_as_it_was(tmp_path, result):
    store = gk.open(tmp_path)
    result.save("labels", store=store)
    result.save("labels", store=store)  # the same again is free
    back = evaluate.Evaluation.load(store, "labels")
    for part in ("metric", "subject", "value", "interval", "sizes", "truth", "universe", "level"):
        assert getattr(back, part) == getattr(result, part)
    for part in ("draws", "items", "item_ids"):
        np.testing.assert_array_equal(getattr(back, part), getattr(result, part))
    np.testing.assert_array_equal(back.curve.values, result.curve.values)
    assert back.curve.names == result.curve.names
    assert str(back.curve) == str(result.curve)
    assert not evaluate.compare(back, result).differs
    assert list(evaluate.evaluations(store)) == ["labels"]


def test_a_store_with_evaluations_is_shown_verified_and_cleaned(tmp_path, result):
    store = gk.open(tmp_path)
    result.save("labels", store=store)
    assert "1 evaluation" in store.info().title
    assert verify(tmp_path).healthy
    assert EvaluationKey("labels") in store.blocks()
    segment = next((tmp_path / "evaluations/labels/seg").glob("*.safetensors"))
    data = bytearray(segment.read_bytes())
    data[-3] ^= 1
    segment.write_bytes(data)
    assert not verify(tmp_path).healthy
    store.delete(EvaluationKey("labels"))
    assert store.evaluations() == []


def test_another_evaluation_of_that_name_is_refused(tmp_path, result):
    store = gk.open(tmp_path)
    result.save("labels", store=store)
    rng = np.random.default_rng(1)
    other = evaluate.label_detection(rng.standard_normal(200), rng.random(200) < 0.1)
    with raises(EvaluationError, "evaluate.name_taken"):
        other.save("labels", store=store)
    with raises(EvaluationError, "evaluate.unknown_evaluation"):
        evaluate.Evaluation.load(store, "lds")


def test_evaluations_are_drawn(result):
    axes = result.plot().axes[0]
    assert axes.get_xlabel() == "rows looked at"
    plain = evaluate.leakage(
        gk.Scores(np.eye(4, 9, dtype=np.float32), np.arange(4), np.arange(9)), [0, 1, 2, 8]
    )
    assert "leakage" in plain.plot().axes[0].get_xlabel()

"""Decisions of people: a log that only grows, in one order, whoever writes, and damage in it is seen."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkeep as gk
from gradkeep.errors import DamagedError, StoreError
from gradkeep.store import Decision, current_decisions, verify


def test_what_is_recorded_is_read_back_in_order(tmp_path):
    store = gk.open(tmp_path)
    first = store.decide(Decision("train", 7, "relabel", label=3, before=5))
    second = store.decide(Decision("train", 7, "undo", of=first.number))
    store.decide(Decision("other", 1, "accept"))
    assert (first.number, second.number) == (0, 1)
    assert gk.open(tmp_path).decisions("train") == [first, second]
    assert store.decisions("train", start=1) == [second]
    assert [one.row for one in store.decisions("other")] == [1]
    assert store.decisions("none") == []
    assert verify(tmp_path).healthy
    gk.store.gc(store)
    assert len(store.decisions("train")) == 2


def test_two_who_decide_at_once_are_both_heard(tmp_path):
    def work(start):
        store = gk.open(tmp_path, durability="process")
        for row in range(start, start + 20):
            store.decide(Decision("train", row, "accept"))

    gk.open(tmp_path)
    threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = gk.open(tmp_path).decisions("train")
    assert [one.number for one in log] == list(range(80))
    assert sorted(one.row for one in log) == sorted(
        100 * n + m for n in range(4) for m in range(20)
    )


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["accept", "relabel", "undo"])), max_size=30
    )
)
def test_what_stands_is_the_last_word_that_was_not_taken_back(text):
    log, stacks = [], {}
    for row, action in text:
        stack = stacks.setdefault(row, [])
        if action == "undo":
            if not stack:
                continue
            log.append(Decision("train", row, "undo", of=stack.pop().number, number=len(log)))
        else:
            log.append(Decision("train", row, action, number=len(log)))
            stack.append(log[-1])
    assert current_decisions(log) == {row: stack[-1] for row, stack in stacks.items() if stack}


@pytest.mark.parametrize("how", ["gone", "changed", "moved"])
def test_damage_to_the_log_is_seen(tmp_path, how):
    store = gk.open(tmp_path)
    for row in range(3):
        store.decide(Decision("train", row, "accept"))
    file = tmp_path / "decisions/train/000001.json"
    if how == "gone":
        file.unlink()
    elif how == "changed":
        file.write_bytes(file.read_bytes().replace(b"accept", b"Accept"))
    else:
        (tmp_path / "decisions/other").mkdir()
        file.rename(tmp_path / "decisions/other/000000.json")
    if how != "moved":
        with pytest.raises(DamagedError):
            store.decisions("train")
    verdict = verify(tmp_path)
    assert any("decisions/" in one.path for one in verdict.damage)


@pytest.mark.parametrize(
    "values",
    [
        {"split": "../up"},
        {"split": ""},
        {"row": 2**63},
        {"action": "delete"},
        {"action": "undo"},
        {"of": 3},
        {"label": 0.5},
    ],
)
def test_what_is_no_decision_is_refused(values):
    with pytest.raises(StoreError):
        Decision(**{"split": "train", "row": 1, "action": "accept", **values})

"""Texts in the formats that they come in, as words and as characters."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raises import raises
from torch.utils.data import DataLoader

from gradkeep.data import dataset
from gradkeep.data._texts import Vocabulary, load_agnews, load_characters
from gradkeep.errors import DataError

CSV = (
    '"3","Fears for ""T N"" pension","Unions say, they are \'disappointed\'."\n'
    '"4","It #39;s over","a second\\team, quot;quoted quot;"\n'
)
TSV = "Unions say\tBusiness\nA\ttab in it\tWorld\n"


def test_news_become_numbers_of_words_with_a_mask(tmp_path):
    (tmp_path / "train.csv").write_text(CSV)
    texts = load_agnews(tmp_path, length=12)
    assert texts.labels.tolist() == [2, 3]
    assert texts.classes == ("World", "Sports", "Business", "Sci/Tech")
    batch = next(iter(DataLoader(texts, batch_size=2)))
    assert {key: tuple(value.shape) for key, value in batch.items()} == {
        "input_ids": (2, 12),
        "attention_mask": (2, 12),
        "labels": (2,),
    }
    words = texts.vocabulary.decode(load_agnews(tmp_path).input_ids[1])
    assert words == '[CLS] it\'s over a second team , " quoted " [SEP]'
    assert torch.equal(batch["attention_mask"], (batch["input_ids"] != 0).long())


def test_lines_with_tabs_are_read_to_the_last_tab(tmp_path):
    (tmp_path / "dev.tsv").write_text(TSV)
    texts = load_agnews(tmp_path / "dev.tsv")
    assert texts.labels.tolist() == [2, 0]
    assert texts.vocabulary.decode(texts[1]["input_ids"]) == "[CLS] a tab in it [SEP]"


def test_words_of_other_splits_are_numbered_as_in_training(tmp_path):
    (tmp_path / "train.csv").write_text(CSV)
    (tmp_path / "test.tsv").write_text(TSV)
    train = dataset("agnews", tmp_path)
    test = dataset("agnews", tmp_path, "test")
    assert test.vocabulary == train.vocabulary
    named = load_agnews(tmp_path / "test.tsv", split="test", vocabulary=str(tmp_path / "train.csv"))
    given_one = load_agnews(tmp_path / "test.tsv", split="test", vocabulary=train.vocabulary)
    assert torch.equal(named.input_ids, test.input_ids)
    assert torch.equal(given_one.input_ids, test.input_ids)
    assert "[UNK]" in test.vocabulary.decode(test.input_ids[1])
    with raises(DataError, "data.no_vocabulary", fix="vocabulary="):
        load_agnews(tmp_path / "test.tsv", split="test")


@pytest.mark.parametrize(
    ("name", "content", "code", "words"),
    [
        ("train.csv", '"5","a","b"\n', "data.text_row", "1 to 4"),
        ("train.csv", '"0","a","b"\n', "data.text_row", "1 to 4"),
        ("train.csv", '"1"\n', "data.text_row", "row 1"),
        ("train.csv", '"1","a","never closed\n', "data.unreadable", ""),
        ("train.csv", "", "data.empty_texts", ""),
        ("train.tsv", "no tab here\n", "data.text_row", "row 1"),
        ("train.tsv", "a\tBusiness\nb\tbusiness news\n", "data.text_row", "row 2"),
        ("train.tsv", b"\xff\tWorld\n", "data.unreadable", ""),
        ("other.txt", "a", "data.no_texts", "no .csv or .tsv"),
    ],
)
def test_files_that_hold_no_news_are_refused(tmp_path, name, content, code, words):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with raises(DataError, code, mentions=words):
        load_agnews(tmp_path)


@given(st.lists(st.text("abc' .", max_size=12), max_size=8), st.randoms(use_true_random=False))
def test_a_vocabulary_does_not_depend_on_the_order_of_texts(texts, random):
    shuffled = random.sample(texts, len(texts))
    assert Vocabulary.build(texts, size=7) == Vocabulary.build(shuffled, size=7)
    assert len(Vocabulary.build(texts, size=7)) <= 7


@given(st.text(), st.integers(2, 9))
def test_every_text_is_encoded_in_the_length_asked_for(text, length):
    ids, mask = Vocabulary.build([text]).encode([text], length=length)
    assert ids.shape == mask.shape == (1, length)
    assert ids[0, 0] == 2
    assert ids[0, mask.sum() - 1] == 3
    assert not ids[0, mask.sum() :].any()
    assert 1 not in ids


def test_a_vocabulary_leaves_out_rare_words_and_refuses_double_ones():
    assert Vocabulary.build(["a a b"], least=2).words[4:] == ("a",)
    with raises(DataError, "data.vocabulary"):
        Vocabulary(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "a"))
    with raises(DataError, "data.text_length"):
        Vocabulary.build(["a"]).encode(["a"], length=1)


@given(st.text(min_size=12, max_size=60), st.integers(1, 4), st.integers(1, 5))
def test_windows_hold_the_text_and_labels_the_character_after(
    tmp_path_factory, text, length, stride
):
    text = text.removeprefix("\ufeff") + "0123456789"
    file = tmp_path_factory.mktemp("text") / "input.txt"
    file.write_bytes(text.encode())
    windows = load_characters(file, length=length, stride=stride, held_out=0)
    assert len(windows) == (len(text) - 1 - length) // stride + 1
    for number, (x, y) in enumerate(windows):
        start = number * stride
        assert "".join(windows.classes[n] for n in x) == text[start : start + length]
        assert "".join(windows.classes[n] for n in y) == text[start + 1 : start + length + 1]


def test_the_end_of_a_text_is_held_out_and_numbered_alike(tmp_path):
    file = tmp_path / "input.txt"
    file.write_text("abcde" * 18 + "zyxwvutsrq")
    train = dataset("text", file, length=8)
    test = dataset("text", file, "test", length=4)
    assert train.classes == test.classes
    assert (len(train), len(test)) == (11, 2)
    assert test.classes[test[0][0][0]] == "z"
    x, y = next(iter(DataLoader(train, batch_size=3)))
    assert x.shape == y.shape == (3, 8)
    with raises(DataError, "data.text_too_short"):
        load_characters(file, split="test", length=10)
    file.write_bytes(b"\xff\xfe")
    with raises(DataError, "data.unreadable"):
        load_characters(file)
    with raises(DataError, "argument.invalid"):
        load_characters(file, length=0)

"""Columns of a data set beside the gradients: kept, asked by SQL, held against a second run."""

import pytest
import torch
from raises import raises
from torch import nn
from torch.utils.data import DataLoader

import gradkeep as gk
from gradkeep.errors import CaptureError
from gradkeep.store import verify

KEY = gk.store.CaptureKey("final", "train")
TEXTS = ["one fish", "zwölf Boxkämpfer", "", "a\nlonger line with 🐟 in it", "five"]
SOURCES = ["news", "books", "news", "web", "web"]


def rows(**changes):
    order = torch.Generator().manual_seed(0)
    result = []
    for at in range(5):
        row = {"x": torch.randn(4, generator=order), "label": at % 3}
        row |= {"text": TEXTS[at], "source": SOURCES[at], "year": 1990 + at, "weight": at / 4}
        result.append(row | {"id": f"doc-{at}"})
    for at, change in changes.items():
        result[int(at[1:])] |= change
    return result


class Taking(nn.Linear):
    """A model that does not mind what else a batch holds."""

    def __init__(self):
        super().__init__(4, 3)

    def forward(self, x, **others):
        return super().forward(x)


def capture(store, data, **options):
    torch.manual_seed(0)
    model = Taking()
    options = {"task": gk.Classification(), "split": "train", "progress": False} | options
    return gk.capture(store, model, DataLoader(data, 2), **options)


NAMES = {"text": "text", "source": "source", "year": "year", "weight": "weight", "document": "id"}


@pytest.mark.parametrize("keep", [None, "losses"])
def test_texts_and_numbers_of_every_row_are_kept(store, keep):
    capture(store, rows(), columns=NAMES, keep=keep)
    block = store.read(KEY)
    assert block.column("text") == TEXTS
    assert block.column("source") == SOURCES
    assert block.column("document") == [f"doc-{at}" for at in range(5)]
    assert block.column("year").tolist() == [1990, 1991, 1992, 1993, 1994]
    assert block.column("weight").tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert block.read([3, 1], ["text"])["text"].texts() == [TEXTS[3], TEXTS[1]]


def test_gradients_are_those_of_the_same_rows_without_columns(store):
    capture(store, rows(), columns=NAMES, name="with")
    plain = [{"x": row["x"], "label": row["label"]} for row in rows()]
    capture(store, plain, name="without")
    ours, theirs = (gk.gradients(store, split="train", name=n) for n in ("with", "without"))
    for name, value in theirs.restore(theirs.ids).items():
        assert torch.equal(ours.restore(ours.ids)[name], value)


def test_sql_asks_for_columns_and_captures_without_them_say_null(store):
    pytest.importorskip("duckdb", reason="duckdb is not installed")
    capture(store, rows(), columns=NAMES)
    plain = [{"x": row["x"], "label": row["label"]} for row in rows()]
    capture(store, plain, name="without")
    result = store.sql(
        "select source, count(*), max(year) from samples where capture = 'main' "
        "group by source order by source"
    )
    assert [tuple(row) for row in result.rows()] == [
        ("books", 1, 1991),
        ("news", 2, 1992),
        ("web", 2, 1994),
    ]
    result = store.sql("select text from samples where capture = 'main' and text like '%🐟%'")
    assert [row[0] for row in result.rows()] == [TEXTS[3]]
    result = store.sql("select count(*) from samples where text is null")
    assert result.rows()[0][0] == 5
    assert verify(store).healthy


def test_a_column_may_be_text_in_one_capture_and_a_number_in_another(store):
    pytest.importorskip("duckdb", reason="duckdb is not installed")
    capture(store, rows(), columns={"origin": "source"}, name="texts")
    capture(store, rows(), columns={"origin": "year"}, name="numbers")
    result = store.sql("select origin from samples order by capture, id")
    assert [row[0] for row in result.rows()] == [str(1990 + at) for at in range(5)] + SOURCES


def test_values_may_be_given_in_the_loader_s_order(store):
    plain = [{"x": row["x"], "label": row["label"]} for row in rows()]
    capture(store, plain, columns={"text": TEXTS, "year": torch.arange(5)})
    assert store.read(KEY).column("text") == TEXTS
    assert store.read(KEY).column("year").tolist() == [0, 1, 2, 3, 4]
    for wrong in (TEXTS[:4], [*TEXTS, "more"]):
        with raises(CaptureError, "capture.column_length"):
            capture(store, plain, columns={"text": wrong}, name="wrong")
    with raises(CaptureError, "capture.columns_by_order"):
        capture(
            store,
            [row | {"n": at} for at, row in enumerate(plain)],
            ids="n",
            columns={"text": TEXTS},
            name="ids",
        )


def test_a_finished_capture_is_known_again_and_another_text_behind_an_id_is_refused(store):
    capture(store, rows(), columns=["text", "source"])
    assert capture(store, rows(), columns=["text", "source"]).reused_rows == 5
    with raises(CaptureError, "capture.rows_changed", mentions="sample 3 "):
        capture(store, rows(r3={"text": "something else"}), columns=["text", "source"])
    assert store.read(KEY).column("text") == TEXTS


def test_documents_of_packs_have_columns_of_their_own(store):
    class Speaker(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

        def forward(self, input_ids, **others):
            return self.head(self.embed(input_ids))

    batch = {
        "input_ids": torch.arange(9)[None],
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]]),
        "title": ["a", "b", "c"],
        "pack": ["first"],
    }
    gk.capture(
        store,
        Speaker(),
        [batch],
        task=gk.LanguageModeling(),
        split="train",
        columns=["title", "pack"],
        progress=False,
    )
    assert store.read(KEY).column("title") == ["a", "b", "c"]
    assert store.read(KEY).column("pack") == ["first"] * 3


@pytest.mark.parametrize(
    ("columns", "change", "code", "mentions"),
    [
        (["nothing"], {}, "capture.missing_column", "'nothing'"),
        (["id"], {}, "capture.reserved_column", "'id'"),
        ({"loss": "year"}, {}, "capture.reserved_column", "'loss'"),
        (["text"], {"text": "\ud800"}, "capture.bad_column", "must hold a text"),
        ({"x2": "x"}, {}, "capture.bad_column", "must hold a text"),
        ({"text": 3}, {}, "argument.invalid", "columns must be"),
        (3, {}, "argument.invalid", "columns must be"),
    ],
    ids=str,
)
def test_columns_that_cannot_be_kept_are_refused(store, columns, change, code, mentions):
    with raises(CaptureError, code, mentions=mentions):
        capture(store, rows(r0=change), columns=columns)
    assert store.captures() == []

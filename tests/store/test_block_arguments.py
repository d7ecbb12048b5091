"""Arguments of reads that are none: told in words."""

import numpy as np
import pytest

import gradkeep as gk
from gradkeep.errors import StoreError

KEY = gk.store.CaptureKey(checkpoint="final", split="train")


@pytest.fixture
def block(tmp_path):
    store = gk.open(tmp_path / "store", durability="process")
    with store.write(KEY, gk.store.Schema((gk.store.Array("loss"),))) as writer:
        writer.append([0, 1], {"loss": np.zeros(2, "f4")})
    return store.read(KEY)


@pytest.mark.parametrize(
    ("named", "call"),
    [
        ("names", lambda block: block.read([0], names=5)),
        ("names", lambda block: block.read_rows([0], names=[5])),
        ("names", lambda block: list(block.stream(names=5))),
        ("batch_rows", lambda block: list(block.stream(batch_rows=1.5))),
        ("batch_rows", lambda block: list(block.stream(batch_rows="2"))),
        ("batch_rows", lambda block: list(block.stream(batch_rows=0))),
        ("fill", lambda block: block.read([0, 9], fill="x")),
        ("fill", lambda block: block.read([0, 9], fill=[1])),
        ("fill", lambda block: block.read([0, 9], fill=0.0)),
    ],
    ids=range(9),
)
def test_arguments_of_reads_are_checked(block, named, call):
    with pytest.raises(StoreError) as raised:
        call(block)
    assert named in str(raised.value)


def test_one_name_may_be_a_text(block):
    assert block.read([1], names="loss")["loss"].tolist() == [0.0]
    assert np.isnan(block.read([9], fill=np.float32("nan"))["loss"]).all()

"""The writer: resuming, refusing, failing."""

import itertools

import numpy as np
import pytest
from raises import raises

import gradkeep as gk
from gradkeep.errors import (
    ConflictError,
    InvalidRowsError,
    MissingRowsError,
    NotSealedError,
    StoreError,
    WriteFailedError,
)
from gradkeep.store import LocalDisk, Memory
from gradkeep.store.backends._disk import Syscalls

KEY = gk.store.CaptureKey(checkpoint="final", split="train")


def schema(**changes):
    arrays = (gk.store.Array("loss"), gk.store.Array("fc.prefix", shape=(3,), kind="prefix"))
    return gk.store.Schema(**{"arrays": arrays, "num_rows": 10, "rows_per_segment": 4, **changes})


def batch(ids):
    ids = np.asarray(ids)
    return ids, {
        "loss": ids.astype(np.float32),
        "fc.prefix": np.stack([ids, ids + 0.5, -ids], axis=1).astype(np.float32),
    }


@pytest.fixture
def store():
    return gk.open(Memory())


def write_all(store, ids=range(10), step=3, **options):
    ids = np.asarray(ids)
    with store.write(KEY, schema(**options)) as writer:
        for at in range(0, len(ids), step):
            writer.append(*batch(ids[at : at + step]))


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 7, 10])
def test_batches_of_any_size_give_the_same_bytes(store, step):
    write_all(store, step=step)
    other = gk.open(Memory())
    write_all(other, step=10)
    assert store.read(KEY).manifest == other.read(KEY).manifest


def test_rows_come_back_by_id_in_the_order_asked_for(store):
    ids = [7, 3, 11, 0, 5, 2, 9, 100, 42, 1]
    write_all(store, ids)
    block = store.read(KEY)
    assert block.ids.tolist() == ids
    assert block.read([100, 7, 7, 1])["loss"].tolist() == [100, 7, 7, 1]
    assert block.read_rows([9, 0])["loss"].tolist() == [1, 7]
    assert [b.first_row for b in block.stream(batch_rows=3)] == [0, 3, 4, 7, 8]


def test_the_callers_memory_may_be_used_again_at_once(store):
    with store.write(KEY, schema()) as writer:
        ids, arrays = batch(range(3))
        for at in range(0, 9, 3):
            arrays["loss"][:] = np.arange(at, at + 3)
            writer.append(ids + at, arrays)
        writer.append([9], {"loss": [9.0], "fc.prefix": [[0.0, 0, 0]]})
        arrays["loss"][:] = -1
    assert store.read(KEY).column("loss").tolist() == list(range(10))


def test_a_second_run_writes_only_what_is_missing(store):
    writer = store.write(KEY, schema())
    writer.append(*batch(range(8)))
    writer.close()
    repeated = store.write(KEY, schema())
    assert not repeated.needs(8)
    assert repeated.needs(9)
    repeated.skip(range(8))
    repeated.append(*batch([8, 9]))
    repeated.seal()
    assert len(store.read(KEY)) == 10


def test_a_sealed_block_needs_nothing(store):
    write_all(store)
    before = store.read(KEY).manifest
    with store.write(KEY, schema()) as writer:
        assert not writer.needs(10)
        writer.skip(range(10))
    assert store.read(KEY).manifest == before


def test_another_order_in_the_second_run_is_noticed(store):
    writer = store.write(KEY, schema())
    writer.append(*batch(range(4)))
    writer.close()
    repeated = store.write(KEY, schema())
    with raises(InvalidRowsError, "store.other_order"):
        repeated.append(*batch([1, 0, 2, 3]))


def test_skipping_rows_that_are_needed_is_refused(store):
    writer = store.write(KEY, schema())
    with raises(MissingRowsError, "store.skipped_row"):
        writer.skip([0])


def test_closing_with_rows_missing_is_an_error_and_keeps_full_segments(store):
    with (
        pytest.raises(MissingRowsError, match="3 rows are missing"),
        store.write(KEY, schema()) as writer,
    ):
        writer.append(*batch(range(7)))
    with raises(NotSealedError, "store.not_sealed", fix="live=True"):
        store.read(KEY)
    assert len(store.read(KEY, live=True)) == 4
    write_all(store)
    assert len(store.read(KEY)) == 10


def test_close_without_seal_tells_of_rows_it_did_not_keep(store):
    writer = store.write(KEY, schema())
    writer.append(*batch([0]))
    with pytest.raises(MissingRowsError, match="1 rows were appended but not saved"):
        writer.close()


def test_an_error_in_the_loop_leaves_what_is_committed(store):
    def interrupted():
        with store.write(KEY, schema()) as writer:
            writer.append(*batch(range(5)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert store.read(KEY, live=True).ids.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("ids", "arrays", "code", "fact"),
    [
        ([0, 0], {}, "store.repeated_in_batch", "0"),
        ([-1, 0], {}, "store.negative_id", "-1"),
        ([0, 99], {}, "store.id_out_of_range", "has 50 examples, but an id is 99"),
        ([0.5, 1.5], {}, "store.invalid_ids", "float64"),
        ([[0, 1]], {}, "store.invalid_ids", r"shape \(1, 2\)"),
        ([0, 1], {"loss": np.zeros(3, np.float32)}, "store.wrong_values", r"shape \(3,\)"),
        ([0, 1], {"loss": np.zeros(2, np.float64)}, "store.wrong_values", "dtype float64"),
        (
            [0, 1],
            {"fc.prefix": np.zeros((2, 4), np.float32)},
            "store.wrong_values",
            r"shape \(2, 4\)",
        ),
        ([0, 1], {"loss": np.array([0, np.nan], np.float32)}, "store.not_finite", "with id 1"),
        (
            [0, 1],
            {"loss": np.array([np.inf, 0], np.float32)},
            "store.not_finite",
            "the first with id 0",
        ),
        ([0, 1], {"extra": np.zeros(2)}, "store.wrong_arrays", "unknown \\['extra'\\]"),
    ],
)
def test_bad_rows_are_refused_and_change_nothing(store, ids, arrays, code, fact):
    with store.write(KEY, schema(num_examples=50)) as writer:
        good = batch([0, 1])[1]
        with pytest.raises(InvalidRowsError, match=fact) as caught:
            writer.append(ids, {**good, **arrays})
        assert caught.value.code == code
        writer.append(*batch(range(10)))
    assert store.read(KEY).ids.tolist() == list(range(10))


def test_a_missing_array_is_named(store):
    writer = store.write(KEY, schema())
    with pytest.raises(InvalidRowsError, match=r"missing \['fc.prefix'\]"):
        writer.append([0], {"loss": [0.0]})


def test_large_values_whose_sum_overflows_are_no_infinity(store):
    with store.write(KEY, schema(num_rows=2)) as writer:
        writer.append([0, 1], {"loss": [3e38, 3e38], "fc.prefix": np.zeros((2, 3), np.float32)})
    assert len(store.read(KEY)) == 2


def test_an_id_given_before_is_refused(store):
    writer = store.write(KEY, schema())
    writer.append(*batch([5]))
    with pytest.raises(InvalidRowsError, match="id 5"):
        writer.append(*batch([5]))
    writer.append(*batch([6]))


def test_too_many_rows_are_refused(store):
    writer = store.write(KEY, schema())
    with raises(InvalidRowsError, "store.too_many_rows", fix="num_rows"):
        writer.append(*batch(range(11)))


def test_a_sealed_block_grows_only_when_asked(store):
    write_all(store, num_rows=None)
    open_ended = schema(num_rows=None)
    with (
        raises(InvalidRowsError, "store.too_many_rows", fix="extend=True"),
        store.write(KEY, open_ended) as writer,
    ):
        writer.append(*batch(range(12)))
    with store.write(KEY, open_ended, extend=True) as writer:
        assert writer.position == 10
        with raises(InvalidRowsError, "store.repeated_id"):
            writer.append(*batch([3]))
        writer.append(*batch([20, 21]))
    assert store.read(KEY).version == 1
    assert len(store.read(KEY)) == 12
    assert len(store.read(KEY, version=0)) == 10


def test_an_extended_block_can_be_written_again_and_repaired(store):
    open_ended = schema(num_rows=None)
    write_all(store, num_rows=None)  # ends in a short segment of two rows
    with store.write(KEY, open_ended, extend=True) as writer:
        writer.append(*batch(range(10, 17)))
    lost = f"{KEY.folder}/seg/000002.safetensors"
    whole = store.backend.read(lost)
    store.backend.delete([lost], durability="full")
    with store.write(KEY, open_ended) as writer:
        assert not writer.needs(8)
        writer.skip(range(8))
        assert writer.needs(2)
        writer.append(*batch(range(8, 17)))
    assert store.backend.read(lost) == whole
    assert store.read(KEY).ids.tolist() == list(range(17))


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_write_some_segments_each_and_another_one_seals(store, workers):
    whole = gk.open(Memory())
    write_all(whole)
    bounds = [0, 1, 2, 3] if workers == 3 else [0, 2, 3]
    for segments in itertools.starmap(range, itertools.pairwise(bounds)):
        with store.write(KEY, schema(), segments=segments) as writer:
            for at in range(0, 10, 2):
                ids, arrays = batch(range(at, at + 2))
                if writer.needs(2):
                    writer.append(ids, arrays)
                else:
                    writer.skip(ids)
    write_all(store)
    assert store.read(KEY).manifest == whole.read(KEY).manifest


def test_the_same_id_from_two_workers_is_found_at_seal(store):
    one = store.write(KEY, schema(), segments=range(1))
    two = store.write(KEY, schema(), segments=range(1, 3))
    one.append(*batch(range(10)))
    two.append(*batch([90, 91, 92, 93, 0, 94, 95, 96, 97, 98]))
    two.close()
    with raises(InvalidRowsError, "store.id_in_two_segments"):
        one.seal()


def test_two_writers_of_different_rows_conflict_loudly(store):
    one, two = store.write(KEY, schema()), store.write(KEY, schema())
    one.append(*batch(range(4)))
    one.flush()
    with raises(ConflictError, "store.conflict"):
        two.append(*batch(range(10, 14)))


def test_two_writers_of_the_same_rows_agree(store):
    one, two = store.write(KEY, schema()), store.write(KEY, schema())
    for writer in (one, two):
        writer.append(*batch(range(10)))
    assert one.seal() == two.seal()


class FailingWrites(Syscalls):
    def __init__(self):
        self.failing = False

    def write(self, fd, data):
        if self.failing:
            raise OSError(28, "No space left on device")
        return super().write(fd, data)


def test_a_failure_in_the_background_fails_the_next_call_and_close(tmp_path):
    calls = FailingWrites()
    store = gk.open(LocalDisk(tmp_path, syscalls=calls))
    writer = store.write(KEY, schema())
    calls.failing = True
    writer.append(*batch(range(3)))
    writer.append(*batch([3]))  # hands the full segment to the background
    with raises(WriteFailedError, "store.disk_full"):
        writer.flush()
    with raises(WriteFailedError, "store.disk_full"):
        writer.append(*batch([4]))
    with raises(WriteFailedError, "store.disk_full"):
        writer.seal()
    with raises(WriteFailedError, "store.disk_full"):
        writer.close()
    calls.failing = False
    write_all(store)
    assert len(store.read(KEY)) == 10


def test_a_closed_writer_says_so(store):
    write_all(store)
    writer = store.write(KEY, schema())
    writer.close()
    with raises(StoreError, "store.writer_closed"):
        writer.append(*batch([0]))


def test_an_empty_block_can_be_sealed(store):
    with store.write(KEY, schema(num_rows=0)):
        pass
    block = store.read(KEY)
    assert len(block) == 0
    assert block.column("fc.prefix").shape == (0, 3)
    assert list(block.stream()) == []
    with pytest.raises(MissingRowsError):
        block.read([0])


def test_rows_can_be_left_out_and_the_old_version_stays(store):
    write_all(store)
    store.drop_rows(KEY, [0, 5, 6, 7, 4])
    assert store.read(KEY).ids.tolist() == [1, 2, 3, 8, 9]
    assert store.read(KEY, version=0).ids.tolist() == list(range(10))
    with pytest.raises(MissingRowsError, match="id 5"):
        store.read(KEY).read([5])
    with pytest.raises(MissingRowsError, match="id 5"):
        store.drop_rows(KEY, [5])
    assert store.read(KEY).read([9, 1])["loss"].tolist() == [9, 1]


def test_a_deleted_block_is_gone_and_its_name_is_free(store):
    write_all(store)
    store.delete(KEY)
    assert store.captures() == []
    with raises(StoreError, "store.no_such_block"):
        store.delete(KEY)
    write_all(store, num_rows=5, ids=range(5))
    assert len(store.read(KEY)) == 5


def test_torch_tensors_come_and_go(store):
    import torch

    arrays = (
        gk.store.Array("x", shape=(2,), kind="suffix", encoding="bfloat16"),
        gk.store.Array("y", "int64"),
    )
    values = torch.randn(5, 2).to(torch.bfloat16)
    with store.write(KEY, gk.store.Schema(arrays, num_rows=5)) as writer:
        writer.append(torch.arange(5), {"x": values, "y": torch.arange(5)})
    for batch_ in store.read(KEY).stream():
        assert torch.equal(batch_.tensor("x"), values.float())
        assert batch_.tensor("y").dtype == torch.int64

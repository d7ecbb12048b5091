"""A check of some segments: what it reads, what it sees without reading, and what it says."""

import numpy as np
import pytest

import gradkeep as gk
import gradkeep.store as gs
from gradkeep.errors import StoreError

SEGMENTS = 12


@pytest.fixture
def folder(tmp_path):
    store = gk.open(tmp_path)
    schema = gs.Schema(
        (gs.Array("value", shape=(4,), kind="data"),), num_rows=4 * SEGMENTS, rows_per_segment=4
    )
    with store.write(gs.CaptureKey("final", "train"), schema) as writer:
        writer.append(np.arange(4 * SEGMENTS), {"value": np.ones((4 * SEGMENTS, 4), np.float32)})
    return tmp_path


def segments(folder):
    actual = sorted((folder / "blocks").rglob("*.safetensors"))
    assert len(actual) == SEGMENTS
    return actual


def flip(path):
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def test_a_sample_reads_so_many_segments_and_says_so(folder):
    whole, some = gs.verify(folder), gs.verify(folder, sample=3)
    assert (whole.segments, whole.read) == (SEGMENTS, SEGMENTS)
    assert (some.segments, some.read) == (SEGMENTS, 3)
    assert some.files == whole.files
    assert some.bytes < whole.bytes
    assert some.healthy
    assert gs.verify(folder, sample=100).read == SEGMENTS


def test_damage_is_found_when_its_segment_is_drawn(folder):
    flip(segments(folder)[5])
    actual = [gs.verify(folder, sample=4, seed=seed).healthy for seed in range(20)]
    assert not all(actual)
    assert any(actual)
    assert actual == [gs.verify(folder, sample=4, seed=seed).healthy for seed in range(20)]
    assert not gs.verify(folder, sample=SEGMENTS).healthy


def test_a_missing_segment_is_found_by_every_sample(folder):
    gone = segments(folder)[2]
    gone.unlink()
    for seed in range(5):
        verdict = gs.verify(folder, sample=1, seed=seed)
        assert [item.what[:7] for item in verdict.damage] == ["missing"]


@pytest.mark.parametrize("sample", [0, -1, 1.5, "3"])
def test_a_sample_is_a_number_of_segments(folder, sample):
    with pytest.raises(StoreError, match="sample"):
        gs.verify(folder, sample=sample)

"""Pictures in the formats that they come in: written small, read back, damaged, refused."""

import contextlib
import gzip
import pickle
import struct
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from raises import raises
from torch.utils.data import DataLoader

from gradkeep.data import dataset, load_cifar10
from gradkeep.data._examples import Examples
from gradkeep.data._files import load_idx, load_npz, read_idx
from gradkeep.data._image_folder import load_image_folder
from gradkeep.errors import DataError, MissingExtraError

CODES = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}
BATCHES = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]


def idx_bytes(values):
    code = CODES[values.dtype.str[1:]]
    head = bytes([0, 0, code, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return head + values.astype(values.dtype.newbyteorder(">")).tobytes()


def write_mnist(folder, *, rows=6, compress=True):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (rows, 5, 4), np.uint8)
    labels = np.arange(rows, dtype=np.uint8) % 3
    for prefix in ("train", "t10k"):
        for name, values in (("images-idx3", images), ("labels-idx1", labels)):
            content = idx_bytes(values)
            file = folder / f"{prefix}-{name}-ubyte{'.gz' if compress else ''}"
            file.write_bytes(gzip.compress(content) if compress else content)
    return images, labels


def cifar_batches(rows=3):
    rng = np.random.default_rng(1)
    return {
        name: (
            rng.integers(0, 256, (rows, 3072), np.uint8),
            rng.integers(0, 10, rows).tolist(),
        )
        for name in BATCHES
    }


def write_pickled(folder, batches, protocol=2, key=str.encode):
    folder.mkdir()
    for name, (data, labels) in batches.items():
        batch = {key("batch_label"): b"x", key("data"): data, key("labels"): labels}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=protocol))


def write_binary(folder, batches):
    folder.mkdir()
    for name, (data, labels) in batches.items():
        rows = np.concatenate([np.array(labels, np.uint8)[:, None], data], 1)
        (folder / f"{name}.bin").write_bytes(rows.tobytes())


def write_pictures(folder, names, *, size=(6, 4)):
    from PIL import Image

    for number, name in enumerate(names):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (number, 10, 20)).save(file, "PNG")


@given(
    st.sampled_from(list(CODES)).flatmap(
        lambda code: arrays.arrays(code, arrays.array_shapes(min_dims=0, max_dims=4, max_side=4))
    ),
    st.booleans(),
)
def test_what_is_written_as_idx_is_read_back(tmp_path_factory, values, compress):
    file = tmp_path_factory.mktemp("idx") / "values"
    content = idx_bytes(values)
    file.write_bytes(gzip.compress(content) if compress else content)
    result = read_idx(file)
    assert result.dtype == values.dtype
    assert result.dtype.isnative
    np.testing.assert_array_equal(result, values)


def test_an_idx_file_cut_anywhere_is_refused(tmp_path):
    content = idx_bytes(np.arange(6, dtype=np.int16).reshape(2, 3))
    file = tmp_path / "values"
    for end in range(len(content)):
        file.write_bytes(content[:end])
        with pytest.raises(DataError) as caught:
            read_idx(file)
        assert caught.value.code in ("data.idx_truncated", "data.not_idx")
    file.write_bytes(content + b"\0")
    with raises(DataError, "data.idx_too_long"):
        read_idx(file)
    file.write_bytes(gzip.compress(content)[:-12])
    with raises(DataError, "data.unreadable"):
        read_idx(file)
    file.write_bytes(b"\0\0\x07" + content[3:])
    with raises(DataError, "data.not_idx"):
        read_idx(file)


@pytest.mark.parametrize("compress", [True, False])
def test_mnist_is_normalised_and_keeps_its_order(tmp_path, compress):
    images, labels = write_mnist(tmp_path, compress=compress)
    plain = load_idx(tmp_path, split="test", normalise=False)
    x, y = next(iter(DataLoader(plain, batch_size=6)))
    torch.testing.assert_close(x[:, 0], torch.from_numpy(images).float() / 255)
    assert y.tolist() == labels.tolist()
    assert plain.classes == ("0", "1", "2")
    x, _ = dataset("idx", tmp_path)[4]
    torch.testing.assert_close(x, (plain[4][0] - 0.1307) / 0.3081)


def test_idx_files_that_do_not_fit_are_refused(tmp_path):
    with raises(DataError, "data.file_missing", mentions="train-images-idx3-ubyte"):
        load_idx(tmp_path)
    write_mnist(tmp_path, compress=False)
    with raises(DataError, "data.label_range"):
        load_idx(tmp_path, classes=["a", "b"])
    labels = tmp_path / "train-labels-idx1-ubyte"
    labels.write_bytes(idx_bytes(np.zeros(5, np.uint8)))
    with raises(DataError, "data.label_count"):
        load_idx(tmp_path)
    labels.write_bytes(idx_bytes(np.zeros(6, np.float32)))
    with raises(DataError, "data.label_type"):
        load_idx(tmp_path)
    with raises(DataError, "data.unknown_name", mentions="test"):
        load_idx(tmp_path, split="tests")


@pytest.mark.parametrize("channels", ["first", "last"])
def test_pictures_in_npz_come_channels_first(tmp_path, channels):
    images = np.random.default_rng(0).integers(0, 256, (4, 3, 5, 6), np.uint8)
    stored = images if channels == "first" else images.transpose(0, 2, 3, 1)
    file = tmp_path / "set.npz"
    np.savez(file, x_train=stored, y_train=np.array([1, 0, 1, 1]), classes=np.array(["a", "b"]))
    examples = load_npz(file)
    assert examples.classes == ("a", "b")
    torch.testing.assert_close(examples[:][0], torch.from_numpy(images).float() / 255)


def test_any_named_arrays_of_an_npz_can_be_asked_for(tmp_path):
    file = tmp_path / "set.npz"
    table = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.savez(file, table=table, kind_dev=np.array([2, 0, 1], np.uint8))
    examples = load_npz(file, split="dev", inputs="table", labels="kind_{split}")
    assert examples[1][0].tolist() == [2.0, 3.0]
    assert examples.labels.dtype == torch.int64
    assert examples.classes == ("0", "1", "2")


@pytest.mark.parametrize(
    ("arrays", "code", "words"),
    [
        (
            {"x_trian": np.zeros((2, 3)), "y_train": np.zeros(2, int)},
            "data.unknown_name",
            "x_trian",
        ),
        ({"x_train": np.zeros((2, 3)), "y_train": np.zeros(3, int)}, "data.label_count", ""),
        ({"x_train": np.zeros((2, 3)), "y_train": np.zeros(2)}, "data.label_type", ""),
        (
            {"x_train": np.zeros((2, 3)), "y_train": np.array([0, -1])},
            "data.label_range",
            "-1 in row 1",
        ),
        ({"x_train": np.zeros((0, 3)), "y_train": np.zeros(0, int)}, "data.no_rows", ""),
        ({"x_train": np.array(["a", "b"]), "y_train": np.zeros(2, int)}, "data.not_numbers", ""),
        ({"x_train": np.array([{}, {}]), "y_train": np.zeros(2, int)}, "data.not_npz", ""),
        (
            {"x_train": np.zeros((2, 3, 9, 3), np.uint8), "y_train": np.zeros(2, int)},
            "data.ambiguous_channels",
            "channels=",
        ),
    ],
)
def test_an_npz_that_does_not_fit_is_refused(tmp_path, arrays, code, words):
    file = tmp_path / "set.npz"
    np.savez(file, **arrays)
    with raises(DataError, code, mentions=words):
        load_npz(file)


def test_what_is_no_npz_is_refused(tmp_path):
    file = tmp_path / "set.npz"
    with raises(DataError, "data.not_npz"):
        load_npz(file)
    np.savez(file, x_train=np.zeros(3), y_train=np.zeros(3, int))
    file.write_bytes(file.read_bytes()[:-30])
    with raises(DataError, "data.not_npz"):
        load_npz(file)
    with open(file, "wb") as single:
        np.save(single, np.zeros(3))
    with raises(DataError, "data.not_npz"):
        load_npz(file)


@pytest.mark.parametrize("form", ["python 2", "python 3", "text keys", "binary", "npz"])
def test_every_form_of_cifar10_gives_the_same_pictures(tmp_path, form):
    batches = cifar_batches()
    place = tmp_path / "set"
    data = np.concatenate([batches[name][0] for name in BATCHES[:5]]).reshape(-1, 3, 32, 32)
    labels = [label for name in BATCHES[:5] for label in batches[name][1]]
    if form == "npz":
        place = tmp_path / "set.npz"
        np.savez(place, x_train=data.transpose(0, 2, 3, 1), y_train=np.array(labels))
    elif form == "binary":
        write_binary(place, batches)
    elif form == "text keys":
        write_pickled(place, batches, protocol=4, key=str)
    else:
        write_pickled(place, batches, protocol=2 if form == "python 2" else 4)
    train = load_cifar10(place, normalise=False)
    assert train.labels.tolist() == labels
    assert train.classes[0] == "airplane"
    torch.testing.assert_close(train[:][0], torch.from_numpy(data).float() / 255)
    normal, _ = load_cifar10(place)[3]
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    torch.testing.assert_close(
        normal, (train[3][0] - mean[:, None, None]) / std[:, None, None], rtol=1e-5, atol=1e-6
    )


def test_the_folder_around_the_batches_will_do(tmp_path):
    write_binary(tmp_path / "cifar-10-batches-bin", cifar_batches())
    assert len(dataset("cifar10", tmp_path, "test")) == 3


class Trap:
    def __reduce__(self):
        return (eval, ("open('sprung', 'w').close()",))


@pytest.mark.parametrize(
    "batch",
    [
        {b"data": np.zeros((1, 3072), np.uint8), b"labels": [0], b"more": Trap()},
        {b"data": np.array([{}], object), b"labels": [0]},
        {b"data": np.zeros((1, 3072)), b"labels": [0]},
        {b"data": np.zeros((1, 3071), np.uint8), b"labels": [0]},
        {b"data": np.zeros((1, 3072), np.uint8), b"labels": [0, 1]},
        {b"data": np.zeros((1, 3072), np.uint8), b"labels": ["cat"]},
        {b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]},
        {b"labels": [0]},
        [1, 2],
    ],
)
def test_a_pickle_with_anything_else_is_refused_and_nothing_runs(tmp_path, monkeypatch, batch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_batch").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(DataError):
        load_cifar10(tmp_path, split="test")
    assert not (tmp_path / "sprung").exists()


@given(st.data())
def test_a_damaged_pickle_is_refused_or_read_but_never_more(tmp_path_factory, data):
    batch = {b"data": np.zeros((1, 3072), np.uint8), b"labels": [0]}
    content = bytearray(pickle.dumps(batch, protocol=2))
    # The head and the tail, where the instructions are; the middle is pixels.
    place = data.draw(st.integers(0, 150) | st.integers(-60, -1))
    content[place] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "test_batch").write_bytes(content)
    with contextlib.suppress(DataError):
        assert len(load_cifar10(folder, split="test")) == 1


def test_batches_that_are_missing_or_cut_are_named(tmp_path):
    with raises(DataError, "data.cifar10_missing"):
        load_cifar10(tmp_path)
    place = tmp_path / "set"
    write_binary(place, cifar_batches())
    (place / "test_batch.bin").write_bytes(bytes(3000))
    with raises(DataError, "data.batch_truncated", mentions="multiple of 3,073"):
        load_cifar10(place, split="test")
    (place / "data_batch_4.bin").unlink()
    with raises(DataError, "data.batches_missing", mentions="data_batch_4.bin"):
        load_cifar10(place)


def test_a_folder_of_pictures_is_sorted_and_passes_over_what_is_none(tmp_path):
    names = ["b/2.JPEG", "b/10.png", "a/deep/er/1.jpg", "a/0.png", "a/.hidden.png", ".git/x.png"]
    write_pictures(tmp_path, names)
    (tmp_path / "a" / "notes.txt").write_text("no picture")
    (tmp_path / "README.md").write_text("no class")
    folder = load_image_folder(tmp_path, normalise=False)
    assert folder.classes == ("a", "b")
    result = [file.relative_to(tmp_path).as_posix() for file in folder.files]
    assert result == ["a/0.png", "a/deep/er/1.jpg", "b/10.png", "b/2.JPEG"]
    x, y = next(iter(DataLoader(folder, batch_size=4)))
    assert x.shape == (4, 3, 4, 6)
    assert y.tolist() == [0, 0, 1, 1]
    assert (x[:, 0, 0, 0] * 255).round().tolist() == [3, 2, 1, 0]
    normal = load_image_folder(tmp_path)[3][0]
    assert normal[2, 0, 0].item() == pytest.approx((20 / 255 - 0.406) / 0.225)


def test_pictures_are_resized_by_the_shorter_side_and_cut_from_the_middle(tmp_path):
    from PIL import Image

    (tmp_path / "a").mkdir()
    image = Image.new("L", (9, 3))
    image.paste(255, (3, 0, 6, 3))
    image.save(tmp_path / "a" / "grey.png")
    x, _ = load_image_folder(tmp_path, crop=3, normalise=False)[0]
    assert x.shape == (3, 3, 3)
    assert (x == 1).all()
    x, _ = load_image_folder(tmp_path, resize=6, normalise=False)[0]
    assert x.shape == (3, 6, 18)
    folder = dataset("imagefolder", tmp_path, crop=4)
    with raises(DataError, "data.image_too_small", fix="resize=4"):
        folder[0]


def test_the_splits_of_a_folder_are_kept_apart(tmp_path):
    write_pictures(tmp_path, ["train/a/0.png", "train/b/0.png", "val/b/0.png"])
    assert len(load_image_folder(tmp_path)) == 2
    assert load_image_folder(tmp_path / "val", split="val").classes == ("b",)
    with raises(DataError, "data.no_split", mentions="train, val"):
        load_image_folder(tmp_path, split="test")


def test_folders_without_pictures_are_refused(tmp_path):
    with raises(DataError, "data.no_classes"):
        load_image_folder(tmp_path)
    with raises(DataError, "data.no_split", mentions="no such folder"):
        load_image_folder(tmp_path / "none")
    (tmp_path / "a").mkdir()
    with raises(DataError, "data.empty_class"):
        load_image_folder(tmp_path)
    (tmp_path / "a" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    folder = load_image_folder(tmp_path)
    with raises(DataError, "data.image_damaged", mentions="broken.png"):
        folder[0]


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e .*\[images\]"):
        load_image_folder(tmp_path)


def test_examples_are_taken_one_by_one_by_slice_and_by_position():
    examples = Examples(torch.eye(4), torch.tensor([0, 1, 2, 0]), ("a", "b", "c"))
    assert examples[-1][1] == 0
    assert examples[1:3][1].tolist() == [1, 2]
    assert examples[[3, 1]][0].argmax(1).tolist() == [3, 1]
    assert len(list(examples)) == 4
    copy = pickle.loads(pickle.dumps(examples))
    assert copy.classes == examples.classes
    with raises(DataError, "data.label_range"):
        Examples(torch.eye(2), torch.tensor([0, 2]), ("a", "b"))

"""Datasets by name, and the real files where there are some."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from raises import raises

from gradkeep.data import dataset, load_digits
from gradkeep.errors import DataError

ROOT = Path(__file__).resolve().parents[2]
REAL = Path(os.environ.get("GRADKEEP_DATA") or ROOT.parent / "shared" / "data")


@pytest.mark.parametrize(
    ("arguments", "options", "code", "words"),
    [
        (("cifar",), {}, "data.unknown_name", "cifar10"),
        (("zzz",), {}, "data.unknown_name", "'digits', 'cifar10', 'agnews'"),
        (("digits", None), {"normalize": True}, "data.unknown_name", "normalise"),
        (("digits", "somewhere"), {}, "data.path_unused", "path"),
        (("idx",), {}, "data.path_missing", "path"),
        (("digits", None, "val"), {}, "data.unknown_name", "'train' or 'test'"),
    ],
)
def test_what_is_not_known_is_answered_with_what_is_near(arguments, options, code, words):
    with raises(DataError, code, mentions=words):
        dataset(*arguments, **options)


def test_the_digits_are_those_of_the_demo_as_pictures():
    digits = load_digits(wrong_labels=0.1, seed=3)
    train = dataset("digits", wrong_labels=0.1, seed=3, normalise=False)
    assert torch.equal(train.inputs.flatten(1), torch.from_numpy(digits.train_images))
    assert train.labels.tolist() == digits.train_labels.tolist()
    normal = dataset("digits", split="test")
    assert normal.inputs.mean().abs() < 0.05
    assert 0.95 < normal.inputs.std() < 1.05


def test_importing_the_data_imports_no_torch():
    code = "import sys, gradkeep.data; print([m for m in ('torch', 'PIL') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.skipif(not REAL.is_dir(), reason="no real data: set GRADKEEP_DATA")
@pytest.mark.parametrize(
    ("kind", "path", "split", "options", "rows", "classes"),
    [
        ("cifar10", "cifar10/cifar10_10k_2k.npz", "test", {}, 2000, 10),
        ("idx", "mnist", "test", {}, 10_000, 10),
        ("agnews", "agnews/alps_dev.tsv", "train", {}, 10_001, 4),
        ("text", "tinyshakespeare/input.txt", "test", {"length": 100}, 1115, 65),
    ],
)
def test_real_files_are_read(kind, path, split, options, rows, classes):
    if not (REAL / path).exists():
        pytest.skip(f"no {path} in GRADKEEP_DATA")
    result = dataset(kind, REAL / path, split, **options)
    assert (len(result), len(result.classes)) == (rows, classes)

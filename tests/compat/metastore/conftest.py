"""Small folders in the layout that MetaStore's README describes, and the formulas beside these tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import published


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to work in, with the published configuration as `config.yaml`."""
    monkeypatch.chdir(tmp_path)
    published.write_config(tmp_path)
    return tmp_path


@pytest.fixture
def vgg_folder(folder):
    published.write_cifar(folder)
    published.write_vgg(folder)
    return folder


@pytest.fixture
def bert_folder(folder):
    published.write_news(folder)
    published.write_bert(folder)
    return folder

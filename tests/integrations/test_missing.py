"""Without the other library a callback says what to install."""

import sys

import pytest

import gradkeep as gk
from gradkeep import integrations
from gradkeep.errors import MissingExtraError

CALLBACKS = {
    "transformers": "GradkeepTrainerCallback",
    "lightning": "GradkeepLightningCallback",
}


@pytest.fixture
def without(monkeypatch):
    """Make a library, and what gradkeep built on it, impossible to import."""

    def remove(library):
        for name in list(sys.modules):
            if name.split(".")[0] == library or name.startswith("gradkeep.integrations._"):
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, library, None)
        for name in integrations.__all__:
            monkeypatch.delitem(vars(integrations), name, raising=False)

    return remove


@pytest.mark.parametrize("extra", CALLBACKS)
def test_a_missing_library_names_its_extra(extra, tmp_path, without):
    without(extra)
    callback = getattr(integrations, CALLBACKS[extra])
    with pytest.raises(MissingExtraError, match=rf"pip install -e .*\[{extra}\]"):
        callback(tmp_path / "store", {"train": []}, task=gk.Classification())
    assert not (tmp_path / "store").exists()


def test_the_recorder_names_its_extra(tmp_path, without):
    without("transformers")
    with pytest.raises(MissingExtraError, match=r"pip install -e .*\[transformers\]"):
        integrations.GradkeepTrainerRecorder(tmp_path / "store")


def test_the_names_are_these():
    writers = ["write_tensorboard", "write_wandb"]
    names = [*CALLBACKS.values(), "GradkeepTrainerRecorder", *writers]
    assert sorted(integrations.__all__) == sorted(names)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = integrations.no_such_name

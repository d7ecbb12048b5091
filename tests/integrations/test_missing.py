"""Without the other library a callback says what to install."""

import importlib.util

import pytest

import gradkeep as gk
from gradkeep import integrations
from gradkeep.errors import MissingExtra

CALLBACKS = {
    "transformers": "GradkeepTrainerCallback",
    "lightning": "GradkeepLightningCallback",
}


@pytest.mark.parametrize("extra", CALLBACKS)
def test_a_missing_library_names_its_extra(extra, tmp_path):
    if importlib.util.find_spec(extra) is not None:
        pytest.skip(f"{extra} is installed")
    callback = getattr(integrations, CALLBACKS[extra])
    with pytest.raises(MissingExtra, match=rf"pip install -e .*\[{extra}\]"):
        callback(tmp_path / "store", {"train": []}, task=gk.Classification())
    assert not (tmp_path / "store").exists()


def test_the_recorder_names_its_extra(tmp_path):
    if importlib.util.find_spec("transformers") is not None:
        pytest.skip("transformers is installed")
    with pytest.raises(MissingExtra, match=r"pip install -e .*\[transformers\]"):
        integrations.GradkeepTrainerRecorder(tmp_path / "store")


def test_the_names_are_these():
    writers = ["write_tensorboard", "write_wandb"]
    names = [*CALLBACKS.values(), "GradkeepTrainerRecorder", *writers]
    assert sorted(integrations.__all__) == sorted(names)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = integrations.no_such_name

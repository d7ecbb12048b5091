"""Keys and flags do what they did, or are refused by name."""

import numpy as np
import published
import pytest
from raises import raises

import gradkeep as gk
from gradkeep.compat.metastore import _config, _run
from gradkeep.compat.metastore._config import parse_indices
from gradkeep.errors import CaptureError


def vgg(content):
    return content["target_model"]["VGG16"]


def test_without_collecting_what_is_kept_is_used(vgg_folder, capsys, monkeypatch):
    assert published.run("VGG16", "cifar10") == 0
    before = published.scores(vgg_folder, "ted_cifar10_25_3")["scores"]
    published.write_config(vgg_folder, lambda c: c["system"].update(collect_artifacts=False))
    captured = []
    capture = gk.capture
    monkeypatch.setattr(
        _run.gk, "capture", lambda *a, **k: captured.append(k["split"]) or capture(*a, **k)
    )
    assert published.run("VGG16", "cifar10") == 0
    assert captured == ["test"]  # queries are made anew, training samples are not
    after = published.scores(vgg_folder, "ted_cifar10_25_3")["scores"]
    np.testing.assert_array_equal(before, after)
    # What is not kept is refused: other samples, other layers, other weights.
    assert published.run("VGG16", "cifar10", "ted", 20, 3) == 1
    error_output = capsys.readouterr().err
    assert "config.yaml: system.collect_artifacts is false" in error_output
    assert "Set system.collect_artifacts: true" in error_output
    published.write_vgg(vgg_folder, seed=4)
    assert published.run("VGG16", "cifar10") == 1
    assert "of other weights" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["store_batch_size", "max_store_batch_size"])
def test_no_more_rows_than_may_wait_to_be_stored_are_held(vgg_folder, key, monkeypatch):
    published.write_config(vgg_folder, lambda c: c["system"]["io"].update({key: 4}))
    sizes = []
    capture = gk.capture

    def watched(store, network, loader, **options):
        sizes.append(loader.batch_size)
        return capture(store, network, loader, **options)

    monkeypatch.setattr(_run.gk, "capture", watched)
    assert published.run("VGG16", "cifar10") == 0
    assert sizes == [4, 4]
    # All samples are scored, also those of a last batch that is not full.
    assert np.abs(published.scores(vgg_folder, "ted_cifar10_25_3")["scores"]).min() > 0


def test_chosen_test_samples_are_asked_about(vgg_folder, capsys):
    assert published.run("VGG16", "cifar10", "ted", 25, 5) == 0
    whole = published.scores(vgg_folder, "ted_cifar10_25_5")
    assert published.run("VGG16", "cifar10", "ted", 25, 1, "--test_indices", "4,1-2") == 0
    some = published.scores(vgg_folder, "ted_cifar10_25_3")
    assert some["query_ids"].tolist() == [4, 1, 2]
    np.testing.assert_allclose(some["scores"], whole["scores"][[4, 1, 2]], rtol=1e-4, atol=1e-7)
    assert published.run("VGG16", "cifar10", "ted", 25, 1, "--test_indices", "3,5") == 1
    assert "no test sample 5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "code"),
    [
        *((text, "compat.test_indices") for text in ("", "a", "3-1", "-1", "1.5", "0-99999999999")),
        *((text, "compat.test_indices_twice") for text in ("1,1", "0-2,2")),
    ],
)
def test_invalid_indices_are_refused(text, code):
    with raises(CaptureError, code):
        parse_indices(text)


def test_another_epoch_and_other_layers_have_gradients_of_their_own(vgg_folder):
    published.write_vgg(vgg_folder, epoch=5, seed=9)
    assert published.run("VGG16", "cifar10") == 0
    first = published.scores(vgg_folder, "ted_cifar10_25_3")["scores"]
    published.write_config(vgg_folder, lambda c: vgg(c).update(target_epoch=5))
    assert published.run("VGG16", "cifar10") == 0
    assert not np.allclose(published.scores(vgg_folder, "ted_cifar10_25_3")["scores"], first)
    published.write_config(vgg_folder, lambda c: vgg(c).update(target_layers=["net_conv12"]))
    assert published.run("VGG16", "cifar10") == 0
    published.write_config(vgg_folder)
    assert published.run("VGG16", "cifar10") == 0
    np.testing.assert_array_equal(published.scores(vgg_folder, "ted_cifar10_25_3")["scores"], first)


def test_a_checkpoint_that_was_trained_again_needs_a_name(vgg_folder, capsys):
    assert published.run("VGG16", "cifar10") == 0
    first = published.scores(vgg_folder, "ted_cifar10_25_3")["scores"]
    published.write_vgg(vgg_folder, seed=4)
    assert published.run("VGG16", "cifar10") == 1
    assert "--name NEW" in capsys.readouterr().err
    assert published.run("VGG16", "cifar10", "ted", 20) == 1  # nothing is kept of these samples
    assert "--name NEW" in capsys.readouterr().err
    assert published.run("VGG16", "cifar10", "ted", 25, 3, "--name", "again") == 0
    renamed_scores = published.scores(vgg_folder, "ted_cifar10_25_3_again")["scores"]
    assert not np.allclose(renamed_scores, first)
    np.testing.assert_array_equal(published.scores(vgg_folder, "ted_cifar10_25_3")["scores"], first)
    assert published.run("VGG16", "cifar10", "ted", 25, 3, "--name", "../up") == 1
    assert "--name cannot be '../up'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("block", "key", "value", "words"),
    [
        ("system", "collect_artefacts", True, "Did you mean collect_artifacts"),
        ("system", "collect_artifacts", "no", "system.collect_artifacts"),
        ("system", "float_precision", "float64", "system.float_precision"),
        ("system", "device", "tpu", "system.device"),
        ("system", "valid_layer_types", ["lstm"], "system.valid_layer_types"),
        ("system", "io", {"max_store_batch_size": 0}, "system.io.max_store_batch_size"),
        ("system", "io", {"gpu_memory_threshold": 2}, "system.io.gpu_memory_threshold"),
        ("system", "quant", {"use_quant": True, "quant_float_precision": "int4"}, "quant.quant_"),
        ("model", "target_epoch", "two", "target_model.VGG16.target_epoch"),
        ("model", "loss_func", "mse", "target_model.VGG16.loss_func"),
        ("model", "target_layers", [], "target_model.VGG16.target_layers"),
        ("model", "target_layers", ["net_bn1"], "is a BatchNorm2d"),
        ("model", "sizes", {"width": "big"}, "width"),
        ("model", "model_name", "GPT", "target_model.GPT.model_name"),
        ("data", "batch_size", "100", "data.cifar10.batch_size"),
        ("data", "data_name", "mnist", "data.mnist.data_name"),
    ],
)
def test_what_is_not_done_is_refused_by_name(vgg_folder, capsys, block, key, value, words):
    def change(content):
        blocks = {
            "system": content["system"],
            "model": vgg(content),
            "data": content["data"]["cifar10"],
        }
        blocks[block][key] = value

    published.write_config(vgg_folder, change)
    assert published.run("VGG16", "cifar10") == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "- 1", "a: [", "system: 3", "\0", "a: 2024-13-01"])
def test_files_that_are_no_configuration_are_told(folder, capsys, content):
    (folder / "config.yaml").write_text(content)
    assert published.run("VGG16", "cifar10") == 1
    assert "config.yaml" in capsys.readouterr().err


def test_whole_gradients_that_the_disk_cannot_hold_are_refused(vgg_folder, capsys, monkeypatch):
    full = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(_run.shutil, "disk_usage", lambda _: full)
    assert published.run("VGG16", "cifar10", "naive") == 1
    assert "naive stores dense gradients" in capsys.readouterr().err
    assert published.run("VGG16", "cifar10", "ted") == 0


def test_flags_overwrite_the_file_even_where_they_are_not_given(vgg_folder):
    read = _config.read(
        "config.yaml",
        method="half",
        target_model="VGG16",
        data="cifar10",
        num_analyzed_samples=100,
        num_query=1,
    )
    assert (read.method, read.num_analyzed_samples, read.weights_only) == ("half", 100, True)

"""The published configuration, unchanged, on folders laid out as its users have them."""

import pickle

import numpy as np
import published
import pytest
import torch
import yaml

import gradkeep as gk
from gradkeep.compat.metastore._config import WorkingFolder


def test_vgg16_runs_from_data_and_models_below_the_working_folder(vgg_folder):
    assert published.run("VGG16", "cifar10") == 0
    scores = published.scores(vgg_folder, "ted_cifar10_25_3")
    assert scores["scores"].shape == (3, 25)
    assert scores["train_ids"].tolist() == list(range(25))
    assert (vgg_folder / "artifacts" / "VGG16_cifar10.gradkeep").is_dir()


def test_the_place_that_the_key_names_comes_first(folder):
    published.write_cifar(folder, rows=5)
    published.write_cifar(folder, rows=7, where="data/cifar10/cifar-10-batches-py")
    published.write_vgg(folder)
    assert published.run("VGG16", "cifar10", "ted", 35, 1) == 0
    assert published.scores(folder, "ted_cifar10_35_1")["scores"].shape == (1, 35)


def test_pictures_are_scaled_by_its_own_deviations(vgg_folder):
    from gradkeep.compat.metastore._data import DataSource

    current_folder = WorkingFolder(vgg_folder, vgg_folder)
    train, test = DataSource("cifar10", {}, current_folder, vgg_folder, "config.yaml").load()
    with open(vgg_folder / "data" / "cifar-10-batches-py" / "test_batch", "rb") as file:
        pixels = pickle.load(file, encoding="bytes")[b"data"].reshape(-1, 3, 32, 32)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    for channel in range(3):
        expected = (pixels[0, channel] / 255 - mean[channel]) / std[channel]
        np.testing.assert_allclose(test[0][0][channel].numpy(), expected, rtol=1e-5, atol=1e-6)
    assert len(train) == 25


def test_bert_runs_with_a_template_of_two_numbers(bert_folder):
    assert published.run("Bert", "AGNews", "ted", 14, 2) == 0
    assert published.scores(bert_folder, "ted_AGNews_14_2")["scores"].shape == (2, 14)


def test_resnet50_runs_on_pictures_that_are_neither_normalised_nor_moved(folder):
    published.write_imagenet(folder)
    place = folder / "models" / "resnet50_models"
    place.mkdir(parents=True)
    network = gk.data.model("resnet50", width=2, classes=1000, seed=1)
    # Saved by a model in DataParallel, whose keys begin with "module.".
    state = {f"module.{key}": value for key, value in network.state_dict().items()}
    torch.save(state, place / "imagenet_state_dict_finetune_2.pth")
    assert published.run("ResNet50", "imagenet", "half", 6, 2) == 0
    scores = published.scores(folder, "half_imagenet_6_2")["scores"]
    network.eval()
    from PIL import Image

    def gradient(path, label):
        pixels = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1) / 255
        loss = torch.nn.functional.cross_entropy(network(pixels[None]), torch.tensor([label]))
        weights = [network.l1.weight, network.model_base.layer4[2].conv2.weight]
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, weights)])

    top = folder / "data" / "imagenet64"
    query, row = gradient(top / "val/n01/1.png", 0), gradient(top / "train/n02/2.png", 1)
    assert scores[1, 5] == pytest.approx(float(query @ row), rel=1e-4)


def test_results_have_its_names_and_hold_what_its_scripts_read(vgg_folder):
    assert published.run("VGG16", "cifar10", "half") == 0
    place = next(vgg_folder.glob("log/*/half_cifar10_25_3"))
    read = {}
    for name in ("e2e_query", "calculation_query", "io_query", "preprocess"):
        with open(place / f"{name}_timer_half.pickle", "rb") as file:
            read[name] = pickle.load(file)
    assert set(read["io_query"]) == set(read["calculation_query"]) == {"net_conv13", "net_l1"}
    assert read["e2e_query"]["half"] >= 0
    merged = yaml.safe_load((place / "config.yaml").read_text())
    assert merged["system"]["method"] == "half"
    assert merged["target_model"]["model_name"] == "VGG16"
    assert merged["data"]["num_analyzed_samples"] == 25


def test_a_configuration_below_the_working_folder_reads_and_writes_there(vgg_folder):
    (vgg_folder / "configs").mkdir()
    (vgg_folder / "config.yaml").rename(vgg_folder / "configs" / "config.yaml")
    assert published.run("VGG16", "cifar10", "ted", 25, 1, "--config", "configs/config.yaml") == 0
    assert (vgg_folder / "log").is_dir()


def test_data_that_is_nowhere_is_told_with_its_key_and_places(folder, capsys):
    published.write_vgg(folder)
    assert published.run("VGG16", "cifar10") == 1
    error_output = capsys.readouterr().err
    assert "data.cifar10.data_dir" in error_output
    assert "config.yaml" in error_output
    assert str(folder / "data" / "cifar10") in error_output
    assert published.run("Bert", "AGNews") == 1
    assert "data.AGNews.train_file" in capsys.readouterr().err
    assert published.run("ResNet50", "imagenet") == 1
    assert "data.imagenet.data_dir" in capsys.readouterr().err


@pytest.mark.parametrize("template", ["/models/{}_{}_{}.pth", "/models/{epoch}.pth", "{"])
def test_a_template_that_cannot_be_filled_is_told(vgg_folder, capsys, template):
    published.write_config(
        vgg_folder, lambda c: c["target_model"]["VGG16"].update(checkpoint_path=template)
    )
    assert published.run("VGG16", "cifar10") == 1
    error_output = capsys.readouterr().err
    assert "target_model.VGG16.checkpoint_path" in error_output
    assert error_output.count("\n") >= 2  # the problem and what to do

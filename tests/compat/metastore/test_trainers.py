"""The trainers of its three pairs write the checkpoints that its command then reads."""

import published
import pytest
import torch

from gradkeep.compat.metastore.model_trainers import bert_trainer, resnet50_trainer, vgg16_trainer


def test_vgg16_trains_and_its_last_epoch_is_asked_about(folder, capsys):
    published.write_cifar(folder)
    flags = ["--n_epochs", "3", "--batch_size", "10", "--sizes", "width=2", "--hidden_size", "512"]
    assert vgg16_trainer.main(flags) == 0
    output = capsys.readouterr().out
    assert output.count("Epoch: ") == 3
    assert "Train Loss" in output
    files = sorted(file.name for file in (folder / "models" / "vgg16_models").iterdir())
    assert files == [f"cifar10_state_dict_finetune_{epoch}.pth" for epoch in range(3)]
    first, last = (torch.load(folder / "models" / "vgg16_models" / files[at]) for at in (0, 2))
    assert not torch.equal(first["conv1.weight"], last["conv1.weight"])
    assert published.run("VGG16", "cifar10") == 0


def test_bert_trains_on_records_and_keeps_its_vocabulary_beside(folder, capsys):
    published.write_news(folder)
    saved = folder / "models" / "bert_models" / "vocab.txt"
    source = folder / "elsewhere.txt"
    saved.rename(source)
    small = "layers=12,inner=8,heads=12"
    flags = ["--n_epochs", "3", "--hidden_size", "24", "--sizes", small, "--lr", "1e-3"]
    assert bert_trainer.main([*flags, "--vocab_file", "elsewhere.txt", "--momentum", "0.5"]) == 0
    assert saved.read_text() == source.read_text()
    losses = [
        float(part.split(",")[0]) for part in capsys.readouterr().out.split("Train Loss ")[1:]
    ]
    assert losses[-1] < losses[0]
    published.write_config(folder, lambda c: c["target_model"]["Bert"].update(sizes={"dim": 24}))
    assert published.run("Bert", "AGNews", "ted", 14, 2) == 0


def test_resnet50_begins_with_weights_of_torchvision(folder, capsys):
    published.write_imagenet(folder)
    from gradkeep.data import model

    base = model("resnet50", width=2, classes=7, seed=8).model_base.state_dict()
    torch.save({**base, "fc.weight": torch.ones(1000, 64)}, folder / "resnet50.pth")
    flags = ["--sizes", "width=2", "--batch_size", "3", "--lr", "1e-9"]
    assert resnet50_trainer.main([*flags, "--weights", "resnet50.pth"]) == 0
    file = folder / "models" / "resnet50_models" / "imagenet_state_dict_finetune_0.pth"
    weight = torch.load(file)["model_base.conv1.weight"]
    torch.testing.assert_close(weight, base["conv1.weight"], rtol=0, atol=1e-5)
    assert resnet50_trainer.main([*flags, "--hidden_size", "512"]) == 1
    assert "--hidden_size appends a layer" in capsys.readouterr().err
    torch.save({"conv": torch.ones(1)}, folder / "other.pth")
    assert resnet50_trainer.main([*flags, "--weights", "other.pth"]) == 1
    assert "not the weights of a ResNet-50" in capsys.readouterr().err


def test_pictures_are_moved_and_turned_but_stay_pictures():
    torch.manual_seed(0)
    pictures = torch.arange(2 * 3 * 8 * 8.0).reshape(2, 3, 8, 8)
    moved = resnet50_trainer.augment_images(pictures)
    assert moved.shape == pictures.shape
    assert set(moved.flatten().tolist()) <= set(pictures.flatten().tolist())


@pytest.mark.parametrize("trainer", [vgg16_trainer, bert_trainer, resnet50_trainer])
def test_missing_data_is_a_message(folder, capsys, trainer):
    assert trainer.main(["--n_epochs", "1"]) == 1
    error_output = capsys.readouterr().err
    assert "trainer: " in error_output
    assert str(folder / "data") in error_output
    with pytest.raises(SystemExit):
        trainer.main(["--n_epochs", "0"])

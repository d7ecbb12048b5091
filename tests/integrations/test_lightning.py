"""The callback for Lightning, in real trainings of a small network with dropout."""

import pytest
import torch
from raises import raises
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradkeep as gk
from gradkeep.errors import CaptureError
from gradkeep.integrations import GradkeepLightningCallback

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries


def new_data(rows, seed):
    order = torch.Generator().manual_seed(seed)
    pictures = torch.randn(rows, 6, generator=order)
    return TensorDataset(pictures, torch.randint(3, (rows,), generator=order))


TRAIN, TEST = new_data(32, 1), new_data(5, 2)


def new_module():
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))

        def training_step(self, batch, number):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    torch.manual_seed(0)
    return Module()


def loaders():
    return {"train": DataLoader(TRAIN, batch_size=8), "test": DataLoader(TEST, batch_size=8)}


def callback(store, **options):
    task = gk.Classification()
    return GradkeepLightningCallback(store, loaders(), task=task, module="net", **options)


def train(folder, callbacks, *, epochs=2):
    module = new_module()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        callbacks=callbacks,
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(5)
    trainer.fit(module, DataLoader(TRAIN, batch_size=8, shuffle=True))
    return module


def test_every_epoch_is_captured_and_the_training_does_not_notice(tmp_path):
    plain = train(tmp_path, [])
    store = gk.open(tmp_path / "store")
    keeping = callback(store)
    captured = train(tmp_path, [keeping])
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, captured.state_dict()[name]), name
    assert [(c.key.checkpoint, c.key.split, c.rows) for c in keeping.captured] == [
        ("epoch-1", "train", 32),
        ("epoch-1", "test", 5),
        ("epoch-2", "train", 32),
        ("epoch-2", "test", 5),
    ]
    known = {c.name: (c.step, c.lr) for c in store.checkpoints("main")}
    assert known == {"epoch-1": (4, pytest.approx(0.1)), "epoch-2": (8, pytest.approx(0.05))}
    assert gk.attribute(store, queries="test", train="train", method="tracin").numpy().shape == (
        5,
        32,
    )


def test_what_is_kept_is_the_gradient_at_the_end(tmp_path):
    store = gk.open(tmp_path / "store")
    keeping = callback(store, at="end")
    net = train(tmp_path, [keeping]).net.eval()
    assert [c.key.checkpoint for c in keeping.captured] == ["epoch-2", "epoch-2"]
    gradients = gk.gradients(store, split="test").restore([3])
    net.zero_grad()
    F.cross_entropy(net(TEST.tensors[0][3:4]), TEST.tensors[1][3:4]).backward()
    for name, weight in net.named_parameters():
        torch.testing.assert_close(gradients[name][0], weight.grad)


def test_epochs_can_be_left_out(tmp_path):
    keeping = callback(tmp_path / "store", every=2)
    train(tmp_path, [keeping], epochs=5)
    assert {c.key.checkpoint for c in keeping.captured} == {"epoch-2", "epoch-4"}


def test_a_second_training_into_the_same_run_is_refused_before_it_starts(tmp_path):
    train(tmp_path, [callback(tmp_path / "store")])
    with raises(CaptureError, "capture.run_exists", fix="run="):
        train(tmp_path, [callback(tmp_path / "store")])


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(CaptureError, match=r"^at must be"):
        callback(tmp_path, at="save")
    with pytest.raises(CaptureError, match="at least 1"):
        callback(tmp_path, every=0)

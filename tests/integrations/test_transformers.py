"""The callback for Hugging Face's Trainer, in real trainings of a small BERT."""

import pytest
import torch
from raises import raises
from torch.utils.data import DataLoader

import gradkeep as gk
from gradkeep.errors import CaptureError
from gradkeep.integrations import GradkeepTrainerCallback

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate, which its Trainer needs, is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries

LAYERS = "bert.encoder.*"


def new_model():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


def new_data(rows, seed):
    order = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 50, (rows, 8), generator=order)
    labels = torch.randint(3, (rows,), generator=order)
    mask = torch.ones(8, dtype=torch.int64)
    return [
        {"input_ids": one, "attention_mask": mask, "labels": label}
        for one, label in zip(ids, labels, strict=True)
    ]


TRAIN, TEST = new_data(32, 1), new_data(5, 2)


def loaders():
    return {"train": DataLoader(TRAIN, batch_size=8), "test": DataLoader(TEST, batch_size=8)}


def train(folder, callbacks, *, resume=None, **options):
    arguments = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8} | options
    trainer = transformers.Trainer(
        model=new_model(),
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=8,
            learning_rate=0.01,
            lr_scheduler_type="linear",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            seed=3,
            **arguments,
        ),
        train_dataset=TRAIN,
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer.model


def test_every_save_is_captured_and_the_training_does_not_notice(tmp_path):
    plain = train(tmp_path / "plain", [])
    store = gk.open(tmp_path / "store")
    callback = GradkeepTrainerCallback(store, loaders(), task=gk.Classification(), layers=LAYERS)
    captured = train(tmp_path / "kept", [callback])
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, captured.state_dict()[name]), name
    assert [(c.key.checkpoint, c.key.split, c.rows) for c in callback.captured] == [
        ("checkpoint-4", "train", 32),
        ("checkpoint-4", "test", 5),
        ("checkpoint-8", "train", 32),
        ("checkpoint-8", "test", 5),
    ]
    known = {c.name: (c.step, c.lr) for c in store.checkpoints("main")}
    assert known["checkpoint-4"] == (4, pytest.approx(0.01 * 5 / 8))
    assert known["checkpoint-8"] == (8, pytest.approx(0.01 * 1 / 8))


def test_what_is_kept_is_the_gradient_at_the_saved_checkpoint(tmp_path):
    store = gk.open(tmp_path / "store")
    callback = GradkeepTrainerCallback(store, loaders(), task=gk.Classification(), layers=LAYERS)
    train(tmp_path / "kept", [callback])
    saved = transformers.BertForSequenceClassification.from_pretrained(
        tmp_path / "kept" / "checkpoint-4"
    )
    saved.eval()
    gradients = gk.gradients(store, split="train", checkpoints="checkpoint-4").restore([7])
    one = {name: value.unsqueeze(0) for name, value in TRAIN[7].items()}
    saved(**one).loss.backward()
    weights = dict(saved.named_parameters())
    assert len(gradients) == 32
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient[0], weights[name].grad, rtol=1e-4, atol=1e-6)


def test_the_captures_can_be_attributed_over_checkpoints(tmp_path):
    store = gk.open(tmp_path / "store")
    callback = GradkeepTrainerCallback(
        store, loaders(), task=gk.Classification(), layers=LAYERS, at="epoch"
    )
    train(tmp_path / "kept", [callback], save_strategy="no")
    scores = gk.attribute(store, queries="test", train="train", method="tracin")
    assert scores.numpy().shape == (5, 32)


def test_a_trainer_that_never_saves_is_refused_at_once(tmp_path):
    callback = GradkeepTrainerCallback(tmp_path / "store", loaders(), task=gk.Classification())
    with raises(CaptureError, "capture.trainer_never_saves", fix="at="):
        train(tmp_path / "kept", [callback], save_strategy="no")


def test_a_second_training_into_the_same_run_is_refused_before_it_starts(tmp_path):
    store = gk.open(tmp_path / "store")

    def again(**options):
        callback = GradkeepTrainerCallback(
            store, loaders(), task=gk.Classification(), layers=LAYERS, at="end", **options
        )
        train(tmp_path / "kept", [callback])
        return callback

    again()
    with raises(CaptureError, "capture.run_exists", fix="run="):
        again()
    assert [c.key.run for c in again(run="second").captured] == ["second", "second"]


def test_a_resumed_training_goes_on_with_its_captures(tmp_path):
    store = gk.open(tmp_path / "store")

    def once(**options):
        callback = GradkeepTrainerCallback(
            store, loaders(), task=gk.Classification(), layers=LAYERS
        )
        train(tmp_path / "kept", [callback], **options)
        return [(c.key.checkpoint, c.reused_rows) for c in callback.captured]

    assert once(max_steps=4) == [("checkpoint-4", 0)] * 2
    saved = tmp_path / "kept" / "checkpoint-4"
    assert once(resume=saved) == [("checkpoint-8", 0)] * 2
    with raises(CaptureError, "capture.run_exists") as caught:
        once(resume=saved, max_steps=12)
    assert "none after step 4" in caught.value.expected


def test_arguments_that_the_training_decides_are_refused(tmp_path):
    with raises(CaptureError, "capture.reserved_options"):
        GradkeepTrainerCallback(tmp_path, loaders(), task=gk.Classification(), split="train")
    with pytest.raises(CaptureError, match=r"^at must be"):
        GradkeepTrainerCallback(tmp_path, loaders(), task=gk.Classification(), at="step")
    with raises(CaptureError, "capture.no_loaders", fix="loaders="):
        GradkeepTrainerCallback(tmp_path, {}, task=gk.Classification())

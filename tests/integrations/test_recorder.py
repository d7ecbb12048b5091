"""The gradients of a Trainer's own steps, and columns of its data set."""

import pytest
import torch
from raises import raises
from torch.utils.data import DataLoader

import gradkeep as gk
from gradkeep.errors import CaptureError
from gradkeep.integrations import GradkeepTrainerCallback, GradkeepTrainerRecorder

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate, which its Trainer needs, is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries
LAYERS = ["*.mlp.*", "*.self_attn.*", "model.embed_tokens"]


def new_model():
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def new_data():
    order = torch.Generator().manual_seed(0)
    rows = torch.randint(31, (12, 6), generator=order)
    results = []
    for at, row in enumerate(rows):
        labels = row.clone()
        labels[: at % 4] = -100  # rows of different numbers of tokens
        results.append({"input_ids": row, "labels": labels, "id": 100 + at})
    return results


def train(folder, callbacks, *, data=None, **options):
    options = {
        "remove_unused_columns": False,
        "num_train_epochs": 1,
        "learning_rate": 0.0,
    } | options
    trainer = transformers.Trainer(
        model=new_model(),
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=4,
            save_strategy="no",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            **options,
        ),
        train_dataset=new_data() if data is None else data,
        callbacks=callbacks,
    )
    trainer.train()
    return trainer.model


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_gradients_of_the_steps_are_those_of_a_replay(tmp_path, accumulated):
    store = gk.open(tmp_path / "store")
    recorder = GradkeepTrainerRecorder(store, layers=LAYERS)
    model = train(
        tmp_path / "out", [recorder], gradient_accumulation_steps=accumulated, num_train_epochs=2
    )
    assert recorder.rows == 24
    data = [{name: value for name, value in row.items() if name != "id"} for row in new_data()]
    gk.capture(
        store,
        model.eval(),
        DataLoader(data, 4),
        task=gk.LanguageModeling(),
        split="train",
        ids=list(range(100, 112)),
        layers=LAYERS,
        progress=False,
    )
    replayed = gk.gradients(store, split="train", checkpoints="final")
    for name in ("epoch-1", "epoch-2"):
        recorded = gk.gradients(store, split="train", checkpoints=name)
        assert sorted(recorded.ids.tolist()) == list(range(100, 112))
        ours, theirs = recorded.restore(replayed.ids), replayed.restore(replayed.ids)
        assert ours.keys() == theirs.keys()
        for layer, value in theirs.items():
            torch.testing.assert_close(ours[layer], value, rtol=1e-4, atol=1e-6)
    assert not model._forward_pre_hooks


def test_the_training_does_not_notice_the_recorder(tmp_path):
    plain = [{name: value for name, value in row.items() if name != "id"} for row in new_data()]
    expected = train(tmp_path / "plain", [], data=plain, learning_rate=0.01)
    recorder = GradkeepTrainerRecorder(tmp_path / "store", layers=LAYERS)
    outcome = train(tmp_path / "kept", [recorder], learning_rate=0.01)
    for name, weight in expected.state_dict().items():
        assert torch.equal(outcome.state_dict()[name], weight), name


def test_what_cannot_be_recorded_is_refused_before_training(tmp_path):
    with raises(CaptureError, "capture.ids_removed", fix="remove_unused_columns"):
        train(tmp_path, [GradkeepTrainerRecorder(tmp_path / "a")], remove_unused_columns=True)
    plain = [{name: value for name, value in row.items() if name != "id"} for row in new_data()]
    with raises(CaptureError, "capture.ids_missing", fix="collate"):
        train(tmp_path, [GradkeepTrainerRecorder(tmp_path / "b", layers=LAYERS)], data=plain)
    with raises(CaptureError, "capture.reserved_options"):
        GradkeepTrainerRecorder(tmp_path / "c", checkpoints="now")


def test_columns_of_a_data_set_are_kept_at_every_checkpoint(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    texts = ["the first story", "a second one", "and a third", "the last"]
    data = datasets.Dataset.from_dict(
        {
            "input_ids": [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [3, 1, 4, 1]],
            "text": texts,
            "source": ["news", "web", "web", "news"],
        }
    ).with_format("torch")
    store = gk.open(tmp_path / "store")
    callback = GradkeepTrainerCallback(
        store,
        {"train": DataLoader(data, 2)},
        task=gk.LanguageModeling(),
        at="end",
        layers=LAYERS,
        columns=["text", "source"],
    )
    train(tmp_path / "out", [callback], max_steps=1)
    (captured,) = callback.captured
    assert store.read(captured.key).column("text") == texts
    assert store.read(captured.key).column("source") == ["news", "web", "web", "news"]

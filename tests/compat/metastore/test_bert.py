"""Its Bert is its Bert: [CLS] read directly, WordPiece, JSON records, 512 positions."""

import json
import math

import published
import pytest
import torch
from torch.nn import functional as F

import gradkeep as gk
from gradkeep.compat.metastore import Customized_Bert_Model, _config
from gradkeep.compat.metastore._data import DataSource
from gradkeep.compat.metastore._models import build_model
from gradkeep.compat.metastore._wordpiece import WordPiece


def read(folder):
    experiment = _config.read(
        str(folder / "config.yaml"),
        method="ted",
        target_model="Bert",
        data="AGNews",
        num_analyzed_samples=14,
        num_query=2,
    )
    source = DataSource(
        "AGNews", experiment.files, experiment.folder, experiment.vocabulary, "config.yaml"
    )
    return experiment, *source.load()


def plain_logits(state, ids, mask, heads=12):
    """BERT by its weights, step by step; the classifier reads the first position."""

    def linear(name, x):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(name, x):
        weight, bias = state[f"{name}.LayerNorm.weight"], state[f"{name}.LayerNorm.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps=1e-12)

    places = torch.arange(ids.shape[1])
    x = state["bert.embeddings.word_embeddings.weight"][ids]
    x = x + state["bert.embeddings.position_embeddings.weight"][places]
    x = norm("bert.embeddings", x + state["bert.embeddings.token_type_embeddings.weight"][0])
    for number in range(12):
        layer = f"bert.encoder.layer.{number}"
        q, k, v = (
            linear(f"{layer}.attention.self.{part}", x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        weights = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        weights = weights.masked_fill(mask[:, None, None, :] == 0, -1e30).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        x = norm(f"{layer}.attention.output", linear(f"{layer}.attention.output.dense", mixed) + x)
        inner = F.gelu(linear(f"{layer}.intermediate.dense", x))
        x = norm(f"{layer}.output", linear(f"{layer}.output.dense", inner) + x)
    return linear("classifier", x[:, 0])


def test_logits_are_those_of_its_weights_without_the_pooler(bert_folder):
    state = published.write_bert(bert_folder)
    experiment, train, _ = read(bert_folder)
    network = build_model(experiment, train)
    assert network.bert.embeddings.position_embeddings.num_embeddings == 512
    rows = train[:14]
    with torch.no_grad():
        logits = network(rows["input_ids"], rows["attention_mask"])
        expected = plain_logits(state, rows["input_ids"], rows["attention_mask"])
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_its_model_has_the_sizes_of_bert_base():
    with torch.device("meta"):
        network = Customized_Bert_Model()
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    assert shapes["bert.embeddings.word_embeddings.weight"] == (30522, 768)
    assert shapes["bert.embeddings.position_embeddings.weight"] == (512, 768)
    assert shapes["bert.encoder.layer.11.output.dense.weight"] == (768, 3072)
    assert shapes["classifier.weight"] == (4, 768)
    assert not any("pooler" in name for name in shapes)


def test_a_pooler_among_the_sizes_is_refused(bert_folder, capsys):
    published.write_config(
        bert_folder, lambda c: c["target_model"]["Bert"].update(sizes={"pooler": True})
    )
    assert published.run("Bert", "AGNews") == 1
    assert "target_model.Bert.sizes.pooler" in capsys.readouterr().err


def test_texts_are_cut_after_their_tokens_are_made(bert_folder):
    pieces = WordPiece(tuple(published.VOCABULARY))
    number = {token: place for place, token in enumerate(published.VOCABULARY)}
    short, long = pieces.encode(["The cats, faster!", "goal " * 60], length=32)[0]
    tokens = ["[CLS]", "the", "cat", "##s", ",", "fast", "##er", "!", "[SEP]"]
    assert short.tolist() == [*(number[token] for token in tokens), *[0] * 23]
    # As it does: the end is cut off with its [SEP].
    assert long.tolist() == [number["[CLS]"], *[number["goal"]] * 31]
    _, train, test = read(bert_folder)
    assert train.input_ids.shape == (14, 32)
    assert test.labels.tolist() == [0, 1, 2, 3, 0, 1]


def test_words_are_split_as_bert_base_uncased_splits_them():
    pieces = WordPiece(
        ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "creme", "won", "##ning", "'")
    )
    assert pieces.tokens("Crème winning\u200b won'WONNING [MASK]") == [
        *("creme", "[UNK]", "won", "'", "won", "##ning", "[MASK]")
    ]
    assert pieces.tokens("\x00\ufffd \t\n") == []
    assert pieces.tokens("won" * 40) == ["[UNK]"]  # longer than a hundred letters


def test_splitting_equals_the_tokenizers_package():
    bert = pytest.importorskip("tokenizers.implementations").BertWordPieceTokenizer
    vocabulary = {token: number for number, token in enumerate(published.VOCABULARY)}
    theirs, ours = bert(vocabulary), WordPiece(tuple(published.VOCABULARY))
    for text in (
        "The CATS' goal!",
        "won\u2028ning İ 漢字 ΣΑΣ",
        "a\x0bcat [SEP] dogs...",
        "mat" * 50,
    ):
        assert theirs.encode(text, add_special_tokens=False).tokens == ours.tokens(text)


def test_a_vocabulary_that_is_missing_or_of_another_checkpoint_is_refused(bert_folder, capsys):
    file = bert_folder / "models" / "bert_models" / "vocab.txt"
    file.write_text("\n".join(published.VOCABULARY[:-1]) + "\n")
    assert published.run("Bert", "AGNews") == 1
    error_output = capsys.readouterr().err
    assert f"{file}: the vocabulary is not that of the checkpoint" in error_output
    file.write_text("hello\n")
    assert published.run("Bert", "AGNews") == 1
    assert "not a WordPiece vocabulary" in capsys.readouterr().err
    file.unlink()
    assert published.run("Bert", "AGNews") == 1
    error_output = capsys.readouterr().err
    assert str(file) in error_output
    assert "vocab_file" in error_output


@pytest.mark.parametrize(
    "content",
    [
        *('{"text": "a"}', "[]", "[1]", '[{"text": "a", "label": 4}]', '[{"text": 1, "label": 0}]'),
        *('[{"text": "a", "label": true}]', "not json", "[" * 100_000),
    ],
)
def test_records_that_are_none_are_told_with_their_file(bert_folder, capsys, content):
    file = bert_folder / "data" / "AGNews" / "train_data.json"
    file.write_text(content)
    assert published.run("Bert", "AGNews") == 1
    assert str(file) in capsys.readouterr().err


def test_a_checkpoint_of_another_model_is_refused(bert_folder, capsys):
    file = bert_folder / "models" / "bert_models" / "agnews_state_dict_finetune_2_768.pth"
    state = torch.load(file)
    del state["classifier.bias"]
    torch.save(state, file)
    assert published.run("Bert", "AGNews") == 1
    assert "classifier.bias" in capsys.readouterr().err


def test_tables_are_read_as_before(bert_folder):
    with open(bert_folder / "data" / "AGNews" / "train.csv", "w") as file:
        file.writelines(f'"{row + 1}","a title {row}","some words of text"\n' for row in range(4))
    change = dict.fromkeys(("train_file", "test_file"), "./data/AGNews/train.csv")
    small = {"dim": 12, "heads": 2, "layers": 12, "inner": 8, "vocabulary": 40}
    published.write_config(
        bert_folder,
        lambda c: (
            c["data"]["AGNews"].update(change),
            c["target_model"]["Bert"].update(target_epoch=7, sizes=small),
        ),
    )
    with pytest.warns(gk.CaptureWarning, match="random weights"):
        assert published.run("Bert", "AGNews", "ted", 4, 1) == 0
    assert json.loads(next(bert_folder.glob("log/*/*/times_ted.json")).read_text())

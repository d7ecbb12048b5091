"""`unwrap` gives the names that go into `target_layers`."""

from torch import nn

import gradkeep as gk
from gradkeep.compat.metastore import VGG16, ResNet50, unwrap


def test_names_and_layers_are_those_of_its_function():
    model = VGG16()
    layers = unwrap(model, "net", [nn.Linear, nn.Conv2d])
    assert [name for name, _ in layers] == [*(f"net_conv{n}" for n in range(1, 14)), "net_l1"]
    assert layers[-1][1] is model.l1
    assert [name for name, _ in unwrap(model, "your_model_name", [nn.Linear])] == [
        "your_model_name_l1"
    ]
    assert unwrap(nn.ReLU(), "net", [nn.Linear]) == []
    assert unwrap(model.l1, "net", [nn.Linear]) == [("net", model.l1)]


def test_the_published_layers_are_among_them():
    large = dict(unwrap(ResNet50(width=2), "net", [nn.Linear, nn.Conv2d]))
    assert {"net_l1", "net_model_base_layer4_2_conv2"} <= set(large)
    bert = gk.data.model("bert", dim=12, heads=2, layers=12, inner=4, vocabulary=9)
    names = dict(unwrap(bert, "net", [nn.Linear]))
    assert "net_bert_encoder_layer_11_attention_self_query" in names


def test_the_public_names_are_these():
    from gradkeep.compat import metastore

    assert sorted(metastore.__all__) == ["Customized_Bert_Model", "ResNet50", "VGG16", "unwrap"]
    for name in metastore.__all__:
        assert getattr(metastore, name).__doc__

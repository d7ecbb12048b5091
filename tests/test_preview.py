"""What rows look like: any source of images, texts and tables, and what a source raises."""

import base64
import io

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from raises import raises

import gradkeep as gk
from gradkeep.errors import CaptureError


def opened(url):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 1), (5, 7, 3), (5, 7, 4), (1, 5, 7), (3, 5, 7)])
@pytest.mark.parametrize("kind", ["uint8", "float32"])
def test_images_come_out_as_they_went_in(shape, kind):
    pixels = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    values = pixels if kind == "uint8" else pixels.astype(np.float32) / 255
    shown = opened(gk.Preview(image=[values]).show(0).image)
    expected = (
        pixels[:, :, 0] if shape[-1] == 1 else np.moveaxis(pixels, 0, 2) if shape[0] < 4 else pixels
    )
    assert np.array_equal(shown, expected[:, :, 0] if shape == (1, 5, 7) else expected)


def test_other_scales_large_images_and_files_are_shown():
    spread = opened(gk.Preview(image=lambda row: torch.randn(3, 9, 9)).show(0).image)
    assert (spread.min(), spread.max()) == (0, 255)
    assert max(opened(gk.Preview(image=[np.zeros((600, 300))]).show(0).image).shape) <= 128
    file = io.BytesIO()
    Image.new("RGB", (4, 4), "red").save(file, "JPEG")
    assert gk.Preview(image=[file.getvalue()]).show(0).image.startswith("data:image/jpeg")
    assert opened(gk.Preview(image=[Image.new("L", (3, 2))]).show(0).image).shape == (2, 3)


def test_texts_tables_and_tokens():
    frame = pd.DataFrame({"age": [30, 41], "city": ["Oslo", "Rome"]})
    preview = gk.Preview(text=lambda row: f"row {row}", table=frame, tokens=[["a"], ["b", "c"]])
    shown = preview.show(1)
    assert (shown.text, shown.tokens) == ("row 1", ("b", "c"))
    assert shown.table == (("age", "41"), ("city", "Rome"))
    assert gk.Preview(table=torch.tensor([[0.5, 2.0]])).show(0).table == (("0", "0.5"), ("1", "2"))
    assert gk.Preview(classes=["cat"]).name_of(0) == "cat"
    assert gk.Preview(classes=["cat"]).name_of(1) is None


@pytest.mark.parametrize("image", [b"no file", np.zeros(3), np.zeros((0, 3)), "text", None])
def test_what_is_no_image_is_told_in_its_place(image):
    shown = gk.Preview(image=lambda row: image).show(3)
    assert shown.problem
    assert shown.image is None


def test_bad_arguments_are_refused():
    with pytest.raises(CaptureError):
        gk.Preview(image=3)
    with pytest.raises(CaptureError):
        gk.Preview(classes=[1])
    model, batch = torch.nn.Linear(2, 2), (torch.zeros(2, 2), torch.zeros(2, dtype=torch.long))
    with raises(CaptureError, "capture.preview_raised"):
        gk.capture(
            "memory://previews",
            model,
            [batch],
            task=gk.Classification(),
            split="a",
            preview=gk.Preview(text=[]),
        )

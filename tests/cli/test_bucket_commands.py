"""Every command that takes a store takes a bucket's URL, too: the same words as of a folder."""

import re

import pytest
import torch

import gradkeep as gk

COMMANDS = (
    ["info", "STORE"],
    ["verify", "STORE"],
    ["sql", "STORE", "select split, count(*) from samples group by split order by split"],
    ["attribute", "STORE", "--method", "dot", "--save", "kept"],
    ["why", "STORE", "3"],
    ["suspects", "STORE"],
    ["leaks", "STORE"],
    ["select", "STORE", "--target", "test", "--keep", "10%"],
    ["report", "STORE", "--out", "report.html"],
    ["gc", "STORE"],
    ["delete", "STORE", "scores/kept", "--yes"],
)


@pytest.fixture
def bucket(s3, monkeypatch, tmp_path):
    for name, value in {
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "body",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": s3,
        "AWS_ALLOW_HTTP": "true",
        "GRADKEEP_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    return "s3://bucket/commands"


def capture(place):
    torch.manual_seed(0)
    x, y = torch.randn(40, 6), torch.arange(40) % 3
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    for split, rows in (("train", slice(0, 30)), ("test", slice(30, 40))):
        task = gk.Classification()
        gk.capture(place, model, [(x[rows], y[rows])], task=task, split=split, progress=False)


def told(text, place):
    """Output without what differs by nature: the place, times, sizes of reports."""
    text = text.replace(str(place), "STORE")
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|[\d.]+ s\b|[\d.]+ MB", "", text)


def test_a_bucket_answers_as_a_folder_does(bucket, inline, tmp_path):
    folder = tmp_path / "store"
    for place in (bucket, folder):
        capture(place)
    for command in COMMANDS:
        answers = []
        for place in (folder, bucket):
            done = inline(*[str(place) if word == "STORE" else word for word in command])
            assert done.returncode == 0, (command, done.stderr)
            answers.append(told(done.stdout, place))
        assert answers[0] == answers[1], command


def test_a_bucket_that_is_not_there_is_one_message(bucket, inline):
    for command in COMMANDS[:4]:
        done = inline(*["s3://nowhere/store" if word == "STORE" else word for word in command])
        assert done.returncode != 0
        assert "s3://nowhere/store" in done.stderr
        assert "Traceback" not in done.stderr

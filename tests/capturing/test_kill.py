"""Killed at any moment, a capture resumes and ends with the same bytes."""

import os
import random
import shutil
import signal
import time

import torch
from torch import nn

import gradkeep as gk
from gradkeep.capturing import _first_batch
from gradkeep.data import GPT

KILLS = 20
KEY = gk.store.CaptureKey("final", "train")


def work(folder):
    """A capture of some hundred milliseconds with many segments."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    generator = torch.Generator().manual_seed(1)
    batches = [
        (
            torch.randn(8, 1, 8, 8, generator=generator),
            torch.randint(0, 10, (8,), generator=generator),
        )
        for _ in range(60)
    ]
    gk.capture(
        folder,
        model,
        batches,
        task=gk.Classification(),
        split="train",
        progress=False,
        memory_budget="150kB",
    )


def killed_within(folder, seconds, task):
    """Run a task in a process of its own and kill it; False if it was done before."""
    child = os.fork()
    if child == 0:
        try:
            task(folder)
        finally:
            os._exit(0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return os.WIFSIGNALED(status)


def contents(folder):
    beside = folder / KEY.moments.folder / "seg"
    roots = [folder / KEY.folder / "seg", *([beside] if beside.exists() else [])]
    whole = [p for root in roots for p in root.iterdir() if not p.name.startswith(".")]
    return {str(p.relative_to(folder)): p.read_bytes() for p in whole}


def check_kills(tmp_path, task):
    """Killed twenty times at random moments, what the task leaves is what it leaves undisturbed."""
    started = time.monotonic()
    task(tmp_path / "whole")
    lasts = time.monotonic() - started
    whole = contents(tmp_path / "whole")
    assert len(whole) > 10
    chance = random.Random(0)
    kills = finished = 0
    while kills < KILLS or not finished:
        folder = tmp_path / f"broken-{finished}"
        if kills < KILLS and killed_within(folder, chance.uniform(0.05, 0.9) * lasts, task):
            kills += 1
            continue
        task(folder)
        assert contents(folder) == whole
        shutil.rmtree(folder)
        finished += 1
    assert kills == KILLS


def compressed(folder):
    """A capture of coordinates with many segments, and the basis before them."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT(vocabulary=13, length=12, dim=16, heads=2, layers=2, tied=True).eval()
    tokens = torch.randint(13, (400, 12), generator=torch.Generator().manual_seed(1))
    gk.capture(
        folder,
        model,
        list(tokens.split(6)),
        task=gk.LanguageModeling(),
        split="train",
        keep=gk.Keep("1KiB", rows=24),
        progress=False,
    )


def test_killed_at_random_moments_it_ends_byte_identical(tmp_path):
    check_kills(tmp_path, work)
    assert any(KEY.moments.folder in name for name in contents(tmp_path / "whole"))


def test_so_does_a_capture_of_coordinates(tmp_path, monkeypatch):
    monkeypatch.setattr(_first_batch, "COORDINATE_ROWS", 8)
    check_kills(tmp_path, compressed)

"""The story of the demo: train on real digits, keep what is left behind, break things, ask."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

import gradkeep as gk
from gradkeep.data import load_digits
from gradkeep.store import LocalDisk, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from gradkeep.data import Digits

RUN = "digits"
EXPLAINED = "explained"
EPOCHS = 30
KEEP_EVERY = 5
INTERRUPTED = gk.CaptureKey(f"epoch-{EPOCHS:02d}", "train", RUN, "interrupted")
_ROWS_PER_SEGMENT = 128


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """What one checkpoint leaves behind for every training image."""

    epoch: int
    weights: str
    """The fingerprint of the weights."""
    arrays: dict[str, np.ndarray[Any, np.dtype[Any]]]

    @property
    def checkpoint(self) -> str:
        return f"epoch-{self.epoch:02d}"


def tell(folder: Path, *, say: Callable[[str], None] = print) -> None:
    """Tell the whole story in `folder`; a second run goes on where the first one stopped."""
    started = time.perf_counter()
    store = gk.open(folder)
    digits = load_digits(wrong_labels=0.08)
    wrong = int(digits.planted.sum())
    say(f"data       1437 digits to train, {wrong} of them with a wrong label planted; 360 to test")
    model = _network()
    last = _train_and_keep(store, model, digits, say)
    _kill_and_resume(store, last, digits, say)
    _damage_and_repair(store, last, digits, say)
    _ask(store, digits, say)
    _explain(store, model, digits, say)
    say(f"done       in {time.perf_counter() - started:.0f} s; the store is {folder}")
    say(f"next       gradkeep info {folder}")
    say(f'           gradkeep sql {folder} "select label, avg(loss) from samples group by label"')
    say(f"           gradkeep why {folder} 113 --run {EXPLAINED}")


def _network() -> nn.Sequential:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _train_and_keep(
    store: gk.Store, model: nn.Sequential, digits: Digits, say: Callable[[str], None]
) -> Kept:
    store.add_run(gk.Run(RUN, {"epochs": EPOCHS, "hidden": 64}, data=digits.fingerprint))
    kept = None
    for kept in _train(model, digits, say):
        store.add_checkpoint(gk.Checkpoint(RUN, kept.checkpoint, kept.weights, step=kept.epoch))
        key = gk.CaptureKey(kept.checkpoint, "train", RUN)
        with store.write(key, _schema(kept, digits)) as writer:
            writer.append(np.arange(len(digits.train_labels)), kept.arrays)
    assert kept is not None
    blocks = [store.read(key) for key in store.captures() if key.capture == "main"]
    size = sum(block.manifest.bytes for block in blocks)
    dense = sum(len(block) * block.schema.dense_row_bytes for block in blocks)
    rows = len(digits.train_labels)
    say(
        f"kept       {len(blocks)} checkpoints x {rows} examples: {size / 1e6:.1f} MB, "
        f"the last layer's gradients in {dense / size:.1f}x fewer bytes than dense"
    )
    return kept


def _train(model: nn.Sequential, digits: Digits, say: Callable[[str], None]) -> Iterator[Kept]:
    """Train a 64-64-10 network; yields what the checkpoints leave behind."""
    import torch
    from torch.nn import functional as F

    images, labels = torch.from_numpy(digits.train_images), torch.from_numpy(digits.train_labels)
    hidden, out = model[0], model[2]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(1, EPOCHS + 1):
        order = torch.randperm(len(images))
        for at in range(0, len(order), 64):
            batch = order[at : at + 64]
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(images[batch]), labels[batch]))
            optimizer.step()
        if epoch % KEEP_EVERY:
            continue
        with torch.no_grad():
            prefix = torch.relu(hidden(images))
            logits = out(prefix)
            # The gradient of a sample's own loss at its logits: softmax minus one-hot.
            suffix = logits.softmax(1) - F.one_hot(labels, 10)
            losses = F.cross_entropy(logits, labels, reduction="none")
        weights = xxhash.xxh3_128()
        for values in model.state_dict().values():
            weights.update(values.numpy())
        arrays = {
            "loss": losses.numpy(),
            "label": digits.train_labels,
            "predicted": logits.argmax(1).numpy(),
            "out.prefix": prefix.numpy(),
            "out.suffix": suffix.numpy(),
        }
        yield Kept(epoch, weights.hexdigest(), arrays)
    tested = model(torch.from_numpy(digits.test_images)).argmax(1).numpy()
    accuracy = float((tested == digits.test_labels).mean())
    say(
        f"trained    a 64-64-10 network for {EPOCHS} epochs: {accuracy:.1%} right on the test digits"
    )


def _schema(kept: Kept, digits: Digits) -> gk.Schema:
    return gk.Schema(
        arrays=(
            gk.Array("loss"),
            gk.Array("label", "int64"),
            gk.Array("predicted", "int64"),
            gk.Array("out.prefix", shape=(64,), kind="prefix", layer="out"),
            gk.Array("out.suffix", shape=(10,), kind="suffix", layer="out", encoding="bfloat16"),
        ),
        num_rows=len(digits.train_labels),
        num_examples=len(digits.train_labels),
        rows_per_segment=_ROWS_PER_SEGMENT,
        layers=(gk.Layer("out", "Linear", 65 * 10),),
        fingerprints={"weights": kept.weights, "data": digits.fingerprint},
    )


def _kill_and_resume(
    store: gk.Store, kept: Kept, digits: Digits, say: Callable[[str], None]
) -> None:
    """Write the last checkpoint once more in another process, kill -9 it, and resume."""
    if INTERRUPTED in store.captures():
        store.delete(INTERRUPTED)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kept.npz"
        arrays: dict[str, Any] = {"weights": np.array(kept.weights), **kept.arrays}
        np.savez(path, **arrays)
        command = [sys.executable, "-m", "gradkeep.cli._story", store.location, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            acknowledged = [child.stdout.readline() for _ in range(4)][-1]
            os.kill(child.pid, signal.SIGKILL)
    promised = int(acknowledged)
    found = len(store.read(INTERRUPTED, live=True))
    lost = max(0, promised - found)
    say(f"killed     a writer with kill -9 after {promised} acknowledged rows: {lost} lost")
    with store.write(INTERRUPTED, _schema(kept, digits)) as writer:
        ids = np.arange(len(digits.train_labels))
        for at in range(0, len(ids), _ROWS_PER_SEGMENT):
            part = slice(at, at + _ROWS_PER_SEGMENT)
            if writer.needs(len(ids[part])):
                writer.append(ids[part], {name: x[part] for name, x in kept.arrays.items()})
            else:
                writer.skip(ids[part])
    whole = store.read(gk.CaptureKey(kept.checkpoint, "train", RUN)).manifest
    same = store.read(INTERRUPTED).manifest.segments == whole.segments
    words = "byte for byte what an uninterrupted run wrote" if same else "NOT the same bytes"
    say(f"resumed    it wrote only the missing rows; the result is {words}")


def _damage_and_repair(
    store: gk.Store, kept: Kept, digits: Digits, say: Callable[[str], None]
) -> None:
    """Flip one bit on disk; verify names it, repair moves it aside, a second run recreates it."""
    backend = LocalDisk(store.location)
    victim = Path(store.location) / INTERRUPTED.folder / "seg" / "000003.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1000] ^= 4
    victim.write_bytes(data)
    found = verify(backend).damage[0]
    say(f"flipped    one bit; verify says: {Path(found.path).name}, tensor {found.tensor!r}")
    verify(backend, repair=True)
    with store.write(INTERRUPTED, _schema(kept, digits)) as writer:
        writer.append(np.arange(len(digits.train_labels)), kept.arrays)
    state = "healthy" if verify(backend).healthy else "NOT healthy"
    say(f"repaired   the file was moved aside and written again; the store is {state}")


def _ask(store: gk.Store, digits: Digits, say: Callable[[str], None]) -> None:
    """Find the planted labels with one question in SQL."""
    query = """
        select id, avg(loss) as loss from samples
        where capture = 'main' group by id order by loss desc, id
    """
    ranked = [int(row[0]) for row in store.sql(query).rows()]
    wrong = int(digits.planted.sum())
    hits = int(digits.planted[ranked[:wrong]].sum())
    more = int(digits.planted[ranked[: 2 * wrong]].sum())
    say(
        f"asked      in SQL for the {wrong} highest mean losses: {hits} of the {wrong} planted "
        f"wrong labels are among them, {more} among twice as many"
    )


def _explain(
    store: gk.Store, model: nn.Sequential, digits: Digits, say: Callable[[str], None]
) -> None:
    """Capture every gradient of the trained network, and ask which rows harmed its mistakes."""
    import torch

    splits = {
        "train": (digits.train_images, digits.train_labels),
        "test": (digits.test_images, digits.test_labels),
    }
    found: list[gk.Captured] = []
    for split, (images, labels) in splits.items():
        batch = (torch.from_numpy(images), torch.from_numpy(labels))
        kept = gk.capture(
            store,
            model,
            [batch],
            task=gk.Classification(),
            split=split,
            run=EXPLAINED,
            progress=False,
        )
        found += [kept] if isinstance(kept, gk.Captured) else kept
    ratio = sum(kept.dense_bytes for kept in found) / sum(kept.bytes for kept in found)
    say(
        f"captured   all gradients of {sum(kept.rows for kept in found)} digits, exact, "
        f"{ratio:.0f}x smaller than dense, in {sum(kept.seconds for kept in found):.1f} s"
    )
    scores = gk.attribute(store, run=EXPLAINED)
    test = store.read(gk.CaptureKey("final", "test", EXPLAINED))
    mistakes = np.flatnonzero(test.column("label") != test.column("predicted"))
    blamed = [int(row) for query in mistakes for row in scores.bottom(5, query=int(query)).ids]
    share = float(digits.planted[blamed].mean())
    say(
        f"explained  {len(mistakes)} mistakes on test digits: of the 5 training rows that harmed each "
        f"most, {share:.0%} have a planted wrong label (of all rows {digits.planted.mean():.0%})"
    )


def _write_slowly(location: str, path: str) -> None:
    """The process that will be killed: says how many rows are acknowledged, again and again."""
    with np.load(path) as loaded:
        arrays = {name: loaded[name] for name in loaded.files if name != "weights"}
        kept = Kept(EPOCHS, str(loaded["weights"]), arrays)
    digits = load_digits(wrong_labels=0.08)
    writer = gk.open(location).write(INTERRUPTED, _schema(kept, digits))
    for at in range(0, len(digits.train_labels), _ROWS_PER_SEGMENT):
        part = slice(at, at + _ROWS_PER_SEGMENT)
        ids = np.arange(len(digits.train_labels))[part]
        writer.append(ids, {name: values[part] for name, values in kept.arrays.items()})
        writer.flush()
        print(writer.position, flush=True)
        time.sleep(0.2)


if __name__ == "__main__":
    _write_slowly(sys.argv[1], sys.argv[2])

"""The folder that malformed command lines are run in: a small real store, and files that are wrong."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np

TRAINING = """
import numpy as np

def main(*_, index, logdir):
    mask = np.random.default_rng(index).random(6) < 0.5
    return {"masks": mask, "margins": np.array([2.0 * mask[0] - mask[4], mask[1]])}

def study():
    raise KeyError("the study has no luck")
"""
STEP = """
import torch

layer = torch.nn.Linear(4, 2)

def step():
    layer(torch.ones(3, 4)).sum().backward()

def broken():
    raise ZeroDivisionError("of the user")
"""
CONFIG = """
store: kept
model: {name: mlp, hidden: [4]}
data:
  train: {kind: digits, rows: 8}
  test: {kind: digits, rows: 4}
"""
SPEC = {
    "num_models": 40,
    "schema": {
        "masks": {"shape": [6], "dtype": "bool_"},
        "margins": {"shape": [2], "dtype": "float32"},
    },
}


class Sandbox:
    """A folder with everything that command lines name, put in order again after each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.master, self.work = root / "master", root / "work"
        self.outside, self.home = root / "outside", root / "home"
        self.home.mkdir(parents=True)
        self.outside.mkdir()
        (self.outside / "victim").write_text("untouched")
        build(self.master)
        self._reset()

    def environment(self) -> dict[str, str]:
        """Where a command may find its home: inside, and watched."""
        home = str(self.home)
        # matplotlib keeps a list of fonts in the user's folders, whoever imports it.
        fonts = str(self.root / "fonts")
        return {
            "HOME": home,
            "XDG_CACHE_HOME": home,
            "TMPDIR": home,
            "COLUMNS": "100",
            "MPLCONFIGDIR": fonts,
        }

    def _reset(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(
            self.master, self.work, symlinks=True, ignore=shutil.ignore_patterns("pipe")
        )
        os.mkfifo(self.work / "pipe")
        self._inside, self._around = listing(self.work), self._listed_around()

    def _listed_around(self):
        around = {**listing(self.outside), **listing(self.home), **listing(self.master)}
        # What an absolute path, or one too many "..", would reach first.
        for place in ("/", "/dev"):
            around |= {os.path.join(place, name): (0, 0) for name in os.listdir(place)}
        for device in ("/dev/null", "/dev/full"):
            around[device] = (os.lstat(device).st_mode if os.path.exists(device) else 0, 0)
        # The measured speeds of this machine belong into the cache.
        cache = str(self.home / "gradkeep")
        return {path: facts for path, facts in around.items() if not path.startswith(cache)}

    def settle(self) -> str | None:
        """What was changed outside of the folder; then everything is as before."""
        around = self._listed_around()
        changed = {
            p for p in around.keys() | self._around.keys() if around.get(p) != self._around.get(p)
        }
        if not (self.work / "pipe").is_fifo():
            changed.add("pipe")  # written by replacing: a device would be gone
        if listing(self.work) != self._inside or changed:
            self._reset()
        return f"changed {sorted(changed)[:3]}" if changed else None


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below a folder with its size and time."""
    result = {}
    for at, folders, files in os.walk(folder):
        for name in (*folders, *files):
            facts = os.lstat(os.path.join(at, name))
            size = 0 if name in folders else facts.st_size
            result[os.path.join(at, name)] = (size, 0 if name in folders else facts.st_mtime_ns)
    return result


def build(folder: Path) -> None:
    """The files that command lines name: good ones, and wrong ones of many kinds."""
    import torch
    from torch import nn

    import gradkeep as gk
    from gradkeep.datamodels import _contract as studies

    folder.mkdir()
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    for name, run in (("store", "main"), ("other", "mine")):
        store = gk.open(folder / name, durability="process")
        for split, count in (("train", 12), ("test", 4)):
            batch = torch.randn(count, 4), torch.arange(count) % 3
            gk.capture(
                store,
                model,
                [batch],
                task=gk.Classification(),
                split=split,
                run=run,
                progress=False,
            )
    gk.open(folder / "bare", durability="process")
    store = gk.open(folder / "store", durability="process")
    (folder / "spec.json").write_text(json.dumps(SPEC))
    studies.initialize(store, studies.Spec.read(folder / "spec.json"), name=studies.MODELS)
    rows, draw = store.rows(studies.MODELS), np.random.default_rng(0)
    for row in range(38):
        mask = draw.random(6) < 0.5
        margins = np.array([2.0 * mask[0] - mask[4], mask[1]], np.float32)
        rows.put(row, {"masks": mask, "margins": margins})
    result = rows.read(range(38))
    gk.datamodels.fit(result["masks"], result["margins"]).save(store, "fitted")
    shutil.copytree(folder / "store", folder / "odd-store")
    shutil.rmtree(folder / "odd-store" / "blocks")
    (folder / "odd-store" / "blocks").write_text("not a folder")
    (folder / "train_model.py").write_text(TRAINING)
    (folder / "step.py").write_text(STEP)
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "groups.txt").write_text("a\nb\na\nb\na\nb\n")
    record_step(folder / "step.log")
    wrong_files(folder)


def record_step(log: Path) -> None:
    """The log of one small step."""
    import torch

    from gradkeep import remat

    layer = torch.nn.Linear(4, 2)
    with remat.record(log):
        layer(torch.ones(3, 4)).relu().sum().backward()


def wrong_files(folder: Path) -> None:
    """Files that are not what they are called."""
    texts = {
        "file.txt": "some text\n",
        "empty": "",
        "list.json": "[1, 2]",
        "number.json": "1e999",
        "deep.json": "[" * 50_000,
        "wrong.json": '{"num_models": "many", "schema": [1, {"shape": [-1.5]}], "commands": 3}',
        "list.yaml": "- 1\n- 2\n",
        "deep.yaml": "[" * 5_000,
        "loop.yaml": "store: &a [*a]\nmodel: &b {name: *a, x: *b}\ndata: {train: *a, test: 3}\n",
        "tagged.yaml": "store: !!python/object/apply:os.system [echo]\n",
        "wrong.yaml": "store: 3\nmodel: {name: [mlp]}\ndata: {train: {kind: 7, rows: x}, test: {}}\n"
        "batch_size: -1\ntolerance: .nan\nlayers: 5\ncheckpoints: {a: {path: 3, odd: 1}}\n",
        "syntax.py": "def step(:\n",
        "raising.py": "raise LookupError('of the user')\n",
        "exiting.py": "import sys\nsys.exit(0)\n",
        "text.npy": "not an array",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "folder").mkdir()
    (folder / "folder" / "notes").write_text("x")
    (folder / "binary.bin").write_bytes(bytes(range(256)) * 4)
    (folder / "broken.npz").write_bytes(b"PK\x03\x04" + bytes(40))
    (folder / "latin.txt").write_bytes("é\n".encode("latin-1"))
    log = (folder / "step.log").read_bytes()
    (folder / "broken.log").write_bytes(log[: len(log) // 2] + b'\x00{"')
    (folder / "odd.log").write_bytes(log.replace(b"1", b"-99999999999999999999"))
    (folder / "dangling").symlink_to("nowhere")
    (folder / "circle").symlink_to("circle")

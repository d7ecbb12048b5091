"""Calls for the fuzz of public functions: captures, budgets and stores; each in a place of its own."""

import functools
import importlib.util
import inspect
import itertools
import tempfile

import torch

import gradkeep as gk
import gradkeep.store as stores
from gradkeep import remat
from gradkeep.integrations import write_tensorboard, write_wandb


class Logging:
    """Takes what a run of wandb takes."""

    summary = None

    def log(self, output):
        pass


def room_calls(w, call):
    """Functions with good arguments, made by `call(name, function, good)`; `w` is the world."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    batch = (torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 0, 1]))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch), batch_size=3)
    task = gk.Classification()
    stored = {"keep": "factors", "layers": None, "encoding": "plain", "tolerance": 0.0}
    captured = {"model": model, "loader": loader, "task": task, "split": "train"}
    captured |= {"checkpoints": "final", "run": "main", "name": "main", "of": None, **stored}
    captured |= {"uncovered": "dense", "mode": "eval", "ids": None, "embeddings": ()}
    captured |= {"memory_budget": None, "resume": True, "step": 3, "lr": 0.1, "progress": False}
    program = remat.chain(6)
    numbers = itertools.count()
    schema = stores.Schema((stores.Array("value"),))
    probabilities = torch.softmax(torch.randn(120, 3), 1).numpy()

    def anew(function, **more):
        """The function on a store that nothing else uses."""

        @functools.wraps(function)
        def run(**values):
            with tempfile.TemporaryDirectory(dir=w.folder) as folder:
                return function(folder, **values, **more)

        signature = inspect.signature(function)
        kept_parameters = list(signature.parameters.values())[1:]
        run.__signature__ = signature.replace(parameters=kept_parameters)
        return run

    def rows_method(name):
        """A method of a row set with two rows that are done."""
        method = getattr(stores.Rows, name)

        def run(**values):
            rows = w.store.rows(f"fuzz{next(numbers)}", schema, num_rows=4)
            rows.put(0, {"value": 1.0})
            rows.put(1, {"value": 2.0})
            return getattr(rows, name)(**values)

        signature = inspect.signature(method)
        run.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
        return run

    words = {key: w.read[key] for key in ("model", "loader", "task")}
    few = words | {
        "split": "train",
        "keep": gk.Keep(256, rows=4),
        "columns": {"name": list("abcd")},
    }
    few |= {"progress": False, "of": "loss", "encoding": "plain", "memory_budget": None}
    table = {
        "capture": (anew(gk.capture), captured),
        "capture of a few bytes": (anew(gk.capture), few),
        "Keep": (
            gk.Keep,
            {"bytes": "4KiB", "bits": 1, "coordinates": "eigen", "group": None, "fold": 4}
            | {"damping": 0.1, "rows": None, "seed": 0, "basis": None},
        ),
        "completions": (
            gk.completions,
            {"prompts": [[5, 6]], "generated": torch.tensor([[5, 6, 7, 8]]), "with_prompt": True}
            | {"pad": None, "eos": None, "ignore_index": -100},
        ),
        "LanguageModeling": (gk.LanguageModeling, {"span": None, "ignore_index": -100}),
        "store.BasisKey": (
            stores.BasisKey,
            {"checkpoint": "final", "run": "main", "capture": "main"},
        ),
        "store.CaptureKey": (
            stores.CaptureKey,
            {"checkpoint": "final", "split": "train", "run": "main", "capture": "main"},
        ),
        "store.ScoresKey": (stores.ScoresKey, {"name": "kept"}),
        "layers": (
            gk.layers,
            {"model": model, "batch": batch, "task": task, "mode": "eval", **stored},
        ),
        "plan": (
            gk.plan,
            {"model": model, "batch": batch, "task": task, "rows": 10, "queries": 2, **stored}
            | {"compute": None, "memory_budget": "1GiB", "mode": "eval"},
        ),
        "preview": (
            gk.Preview,
            {"image": None, "text": ["a", "b"], "table": None, "tokens": None, "classes": ["x"]},
        ),
        "attribution.show": (gk.show, {"scores": w.scores, "query": [0], "k": 2, "preview": None}),
        "integrations.write_tensorboard": (
            write_tensorboard,
            {"store": w.store, "folder": w.folder / "events", "suspected": 2, "budget": None},
        ),
        "preview.show": (gk.Preview(text=["a", "b"]).show, {"row": 0}),
        "decision": (
            gk.store.Decision,
            {"split": "train", "row": 1, "action": "relabel", "label": 1, "before": 0, "of": None},
        ),
        "suspects": (
            gk.suspects,
            {"store": w.store, "train": "train", "by": "loss", "checkpoints": None}
            | {"run": "main", "name": "main", "probabilities": None, "labels": None, "ids": None},
        ),
        "suspects of probabilities": (
            gk.suspects,
            {"probabilities": probabilities, "labels": probabilities.argmax(1), "ids": None}
            | {"by": "noise"},
        ),
        "memory_budget": (
            gk.memory_budget,
            {"budget": 0.5, "mode": "auto", "seed": 0, "recordings": 3, "min_size": None}
            | {"effort": 1.0, "heuristic": "dtr-eq", "check": "full"},
        ),
        "MemoryBudget.replan": (gk.memory_budget(0.5).replan, {"budget": 0.5}),
        "MemoryBudget.load": (gk.memory_budget(0.5).load, {"path": w.folder / "plans.json"}),
        "MemoryBudget.save": (gk.memory_budget(0.5).save, {"path": w.folder / "plans.json"}),
        "remat.simulate": (
            remat.simulate,
            {"program": program, "heuristic": "dtr-eq", "budget": 100, "policy": "eager"}
            | {"limit": 4.0, "skip_small": False, "sample": False, "seed": 0},
        ),
        "remat.chain": (remat.chain, {"length": 5, "size": 1, "cost": 1}),
        "remat.heuristic": (remat.heuristic, {"name": "dtr"}),
        "remat.record": (remat.record, {"path": w.folder / "step.log", "in_place": "alias"}),
        "remat.read_log": (
            remat.read_log,
            {"source": [], "outputs": "rematerialize", "from_start": True},
        ),
        "remat.unlimited_peak": (remat.unlimited_peak, {"program": program}),
        "remat.simplify": (remat.simplify, {"program": program}),
        "store.open": (
            stores.open,
            {"path": w.folder / "opened", "create": True, "durability": "process"}
            | {"verify": True},
        ),
        "store.verify": (stores.verify, {"store": w.store, "repair": False, "progress": None}),
        "store.gc": (stores.gc, {"store": w.store, "keep_versions": 1, "dry_run": True}),
        "store.Array": (
            stores.Array,
            {"name": "a", "dtype": "float32", "shape": (2,), "kind": "data"}
            | {"encoding": "plain", "layer": None, "ragged": False, "nan": "refuse"},
        ),
        "store.Schema": (
            stores.Schema,
            {"arrays": schema.arrays, "num_rows": 3, "num_examples": None}
            | {"rows_per_segment": 0, "layers": (), "fingerprints": {}},
        ),
        "store.Checkpoint": (
            stores.Checkpoint,
            {"run": "main", "name": "a", "weights": "0" * 32, "step": 1, "lr": 0.1},
        ),
        "store.Run": (stores.Run, {"name": "main", "config": {}, "code": None, "data": None}),
        "Store.sql": (w.store.sql, {"query": "select 1"}),
        "Store.read": (w.store.read, {"key": w.train.key, "version": None, "live": False}),
        "Store.has": (w.store.has, {"key": w.train.key}),
        "Store.checkpoints": (w.store.checkpoints, {"run": "main"}),
        "Store.rows": (w.store.rows, {"name": "squares", "schema": None, "num_rows": None}),
        "Rows.claim": (
            rows_method("claim"),
            {"owner": "me", "seconds": 60.0, "count": 1, "max_attempts": 3},
        ),
        "Rows.compact": (rows_method("compact"), {"rows_per_file": 2, "partial": False}),
        "Rows.counts": (rows_method("counts"), {"max_attempts": 3}),
        "Rows.grow": (rows_method("grow"), {"num_rows": 9}),
        "Rows.has": (rows_method("has"), {"row": 0}),
        "Rows.put": (
            rows_method("put"),
            {"row": 2, "arrays": {"value": 1.0}, "differing": "raise"},
        ),
        "Rows.read": (rows_method("read"), {"rows": [0, 1], "names": None, "fill": None}),
        "Rows.retry": (rows_method("retry"), {"rows": [3]}),
        "Rows.states": (rows_method("states"), {"max_attempts": 3}),
    }
    if importlib.util.find_spec("wandb") is not None:
        output = {"store": w.store, "run": Logging(), "suspected": 2, "budget": None}
        table["integrations.write_wandb"] = (write_wandb, output)
    return [call(name, function, good) for name, (function, good) in table.items()]

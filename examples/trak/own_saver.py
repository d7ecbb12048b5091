"""A saver of one's own, as it is written for the released TRAK package: only the import differs.

Arrays are memory maps in a folder per model id. Nothing here knows of gradkeep's store. Used as
`TRAKer(..., saver=FolderSaver)`; run as a script, it scores 10 digits and prints the best rows.
"""

import json
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.lib.format import open_memmap

from gradkeep.compat.trak import TRAKer  # was: from trak import TRAKer
from gradkeep.compat.trak.savers import AbstractSaver, ModelIDException  # was: trak.savers
from gradkeep.data import load_digits


class FolderSaver(AbstractSaver):
    def __init__(
        self,
        save_dir,
        metadata,
        train_set_size,
        proj_dim,
        load_from_save_dir,
        logging_level,
        use_half_precision,
    ):
        super().__init__(
            save_dir=save_dir,
            metadata=metadata,
            load_from_save_dir=load_from_save_dir,
            logging_level=logging_level,
            use_half_precision=use_half_precision,
        )
        self.train_set_size, self.proj_dim = train_set_size, proj_dim
        self.dtype = np.float16 if use_half_precision else np.float32

    def register_model_id(self, model_id, _allow_featurizing_already_registered):
        if model_id in self.model_ids and not _allow_featurizing_already_registered:
            raise ModelIDException(f"model id {model_id} is taken")
        self.model_ids[model_id] = {"is_featurized": 0, "is_finalized": 0}
        self.init_store(model_id)
        self.serialize_current_model_id_metadata(already_exists=False)

    def init_store(self, model_id):
        self.load_current_store(model_id, mode="w+")

    def serialize_current_model_id_metadata(self, already_exists=True):
        state = self.model_ids[self.current_model_id]
        state["is_featurized"] = int(self.current_store["is_featurized"].all())
        path = self.save_dir / f"id_{self.current_model_id}.json"
        path.write_text(json.dumps({str(self.current_model_id): state}))

    def init_experiment(self, exp_name, num_targets, model_id):
        if model_id not in self.model_ids:
            raise ModelIDException(f"model id {model_id} is unknown")
        known = json.loads(self.experiments_file.read_text())
        known[exp_name] = {
            "num_targets": num_targets,
            "scores_path": str(self.save_dir / "scores" / f"{exp_name}.mmap"),
            "scores_finalized": 0,
        }
        self.experiments[exp_name] = known[exp_name]
        self.experiments_file.write_text(json.dumps(known))
        there = (self.save_dir / str(model_id) / f"{exp_name}_grads.mmap").exists()
        self.load_current_store(model_id, exp_name, num_targets, "r+" if there else "w+")

    def load_current_store(self, model_id, exp_name=None, exp_num_targets=-1, mode="r+"):
        self.current_model_id = model_id
        own = self.save_dir / str(model_id)
        os.makedirs(own, exist_ok=True)
        n, k = self.train_set_size, self.proj_dim
        if exp_name is None:
            arrays = {
                "grads": (own / "grads.mmap", (n, k), self.dtype),
                "out_to_loss": (own / "out_to_loss.mmap", (n, 1), self.dtype),
                "features": (own / "features.mmap", (n, k), self.dtype),
                "is_featurized": (own / "is_featurized.mmap", (n, 1), np.int32),
            }
        else:
            self.current_experiment_name = exp_name
            scores = self.save_dir / "scores" / f"{exp_name}.mmap"
            arrays = {
                f"{exp_name}_grads": (
                    own / f"{exp_name}_grads.mmap",
                    (exp_num_targets, k),
                    self.dtype,
                ),
                f"{exp_name}_scores": (scores, (n, exp_num_targets), self.dtype),
            }
        for name, (path, shape, dtype) in arrays.items():
            self.current_store[name] = None
            if mode == "w+" or path.exists():
                self.current_store[name] = open_memmap(path, mode, dtype, shape)

    def save_scores(self, exp_name):
        self.current_store[f"{exp_name}_scores"].flush()
        self.experiments[exp_name]["scores_finalized"] = 1
        self.experiments_file.write_text(json.dumps(self.experiments))

    def del_grads(self, model_id):
        (self.save_dir / str(model_id) / "grads.mmap").unlink()


def main(save_dir: str | Path) -> np.ndarray:
    """Scores `[n, 10]` of some digits for the first ten."""
    digits = load_digits()
    x = torch.from_numpy(digits.train_images[:200])
    y = torch.from_numpy(digits.train_labels[:200])
    torch.manual_seed(0)
    model = torch.nn.Linear(x.shape[1], 10)
    traker = TRAKer(
        model,
        "image_classification",
        train_set_size=200,
        save_dir=save_dir,
        saver=FolderSaver,
        proj_dim=64,
        device="cpu",
        use_half_precision=False,
    )
    traker.load_checkpoint(model.state_dict(), model_id=0)
    traker.featurize((x, y), num_samples=200)
    traker.finalize_features()
    traker.start_scoring_checkpoint("first", model.state_dict(), 0, num_targets=10)
    traker.score((x[:10], y[:10]), num_samples=10)
    return traker.finalize_scores("first")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(main(folder).argmax(0))

"""A script as one is written for TRAK; only the import differs.

quickstart.py STAGE[,STAGE] CHECKPOINTS SAVE_DIR BATCH_SIZE [RANK | own]

With `own` the saver is the one of examples/trak.
"""

import logging
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from gradkeep.compat.trak import TRAKer


def main(arguments):
    stages, folder = arguments[0].split(","), Path(arguments[1])
    torch.manual_seed(0)
    train_set = TensorDataset(torch.randn(40, 5), torch.randint(3, (40,)))
    targets = TensorDataset(torch.randn(6, 5), torch.randint(3, (6,)))
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))

    if "train" in stages:
        for number in range(2):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x, y in DataLoader(train_set, batch_size=8):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            torch.save(model.state_dict(), folder / f"{number}.pt")
        return

    saver = None
    if arguments[-1] == "own":
        sys.path.append(str(Path(__file__).resolve().parents[3] / "examples" / "trak"))
        from own_saver import FolderSaver as saver

    save_dir, batch_size = arguments[2], int(arguments[3])
    checkpoints = [torch.load(folder / f"{number}.pt", weights_only=True) for number in range(2)]
    traker = TRAKer(
        model=model,
        task="image_classification",
        train_set_size=len(train_set),
        save_dir=save_dir,
        device="cpu",
        proj_dim=16,
        use_half_precision=False,
        logging_level=logging.ERROR,
        saver=saver,
    )
    if "featurize" in stages:
        for number, checkpoint in enumerate(checkpoints):
            traker.load_checkpoint(checkpoint, model_id=number)
            for batch in DataLoader(train_set, batch_size=batch_size):
                traker.featurize(batch=batch, num_samples=batch[0].shape[0])
                print("featurized", flush=True)
    if "shard" in stages:
        rank = int(arguments[4])
        for number, checkpoint in enumerate(checkpoints):
            traker.load_checkpoint(checkpoint, model_id=number)
            for start in range(rank * batch_size, len(train_set), 2 * batch_size):
                inds = torch.arange(start, min(start + batch_size, len(train_set)))
                traker.featurize(batch=train_set[inds], inds=inds)
    if "finalize" in stages:
        traker.finalize_features()
    if "score" in stages:
        for number, checkpoint in enumerate(checkpoints):
            traker.start_scoring_checkpoint(
                exp_name="quickstart",
                checkpoint=checkpoint,
                model_id=number,
                num_targets=len(targets),
            )
            for batch in DataLoader(targets, batch_size=max(1, batch_size)):
                traker.score(batch=batch, num_samples=batch[0].shape[0])
                print("scored", flush=True)
    if "gather" in stages:
        traker.finalize_scores(exp_name="quickstart")


if __name__ == "__main__":
    main(sys.argv[1:])

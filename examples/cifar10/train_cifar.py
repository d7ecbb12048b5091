"""One network on a random half of CIFAR-10, and its margins on the test pictures.

--trainer.data is what `gradkeep.data.load_cifar10` reads: the folder of the published archive, the
folder around it, or an .npz file. Nothing is downloaded.
"""

import argparse

import numpy as np
import torch
from torch.nn import functional

from gradkeep import data


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainer.data", dest="data", default="data/cifar-10-batches-bin")
    parser.add_argument("--trainer.alpha", dest="alpha", type=float, default=0.5)
    parser.add_argument("--trainer.epochs", dest="epochs", type=int, default=24)
    parser.add_argument("--trainer.batch_size", dest="batch_size", type=int, default=512)
    parser.add_argument("--trainer.width", dest="width", type=int, default=64)
    parser.add_argument("--trainer.lr", dest="lr", type=float, default=0.5)
    return parser.parse_known_args()[0]


def main(*_, index, logdir):
    given = arguments()
    train, test = (data.load_cifar10(given.data, split=split) for split in ("train", "test"))
    mask = np.random.default_rng(index).random(len(train)) < given.alpha
    torch.manual_seed(index)
    model = trained(train, np.flatnonzero(mask), given)
    return {"masks": mask, "margins": margins(model, test, given.batch_size)}


def trained(examples, rows, given):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = data.ResNet9(width=given.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), given.lr, momentum=0.9, weight_decay=5e-4)
    steps = given.epochs * -(-len(rows) // given.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, given.lr, steps)
    for _ in range(given.epochs):
        for some in torch.from_numpy(rows)[torch.randperm(len(rows))].split(given.batch_size):
            x, y = (part.to(device) for part in examples[some])
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def margins(model, examples, batch_size):
    """The right logit minus the largest other one `[N]`, float16."""
    device = next(model.parameters()).device
    found = []
    for start in range(0, len(examples), batch_size):
        x, y = examples[start : start + batch_size]
        logits = model(x.to(device)).float().cpu()
        right = logits.gather(1, y[:, None])[:, 0]
        found.append(right - logits.scatter(1, y[:, None], -torch.inf).amax(1))
    return torch.cat(found).numpy().astype(np.float16)

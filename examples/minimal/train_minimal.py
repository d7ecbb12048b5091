"""The least that a worker can call: one row of numbers, and a flag of its own."""

import argparse

import numpy as np


def main(*_, index, logdir):
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainer.multiple", dest="multiple", type=int, required=True)
    known, _ = parser.parse_known_args()  # the worker's own flags are in sys.argv too
    return {"random_numbers": np.full(256, known.multiple, np.uint8)}

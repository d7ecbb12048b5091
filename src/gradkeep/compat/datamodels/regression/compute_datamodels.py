"""`python -m ...regression.compute_datamodels -C config.yaml`; dotted flags override the file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradkeep.compat.datamodels._command_line import Flag, collect, run_command
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from collections.abc import Sequence


def _whole(value: Any) -> int:
    number = float(value)
    if number != int(number):
        raise ValueError(value)
    return int(number)


FLAGS = (
    Flag("data.data_path", required=True),
    Flag("data.num_train", _whole, required=True),
    Flag("data.num_val", _whole, required=True),
    Flag("data.target_start_ind", _whole, default=0),
    Flag("data.target_end_ind", _whole, default=-1),
    Flag("cfg.k", _whole, required=True),
    Flag("cfg.eps", float, default=1e-5),
    Flag("cfg.out_dir", required=True),
    Flag("cfg.use_bias", _whole, default=1),
    # Accepted for the original solver's steps and ignored.
    Flag("data.seed", _whole),
    Flag("cfg.lr", float),
    Flag("cfg.batch_size", _whole),
    Flag("cfg.num_workers", _whole),
    Flag("early_stopping.check_every", _whole),
    Flag("early_stopping.eps", float),
)


def main(arguments: Sequence[str]) -> None:
    """Fit datamodels and write `datamodels.pt` to a new folder."""
    from gradkeep._display import progress
    from gradkeep.compat.datamodels._regression import RegressionData, compute_datamodels

    settings = collect(FLAGS, arguments)
    if settings["cfg.use_bias"] != 1:
        raise DatamodelsError(
            "datamodels without a bias are not supported",
            code="compat.no_bias",
            found="--cfg.use_bias=0",
        )
    stop = settings["data.target_end_ind"]
    with progress("datamodels", "penalties") as report_progress:
        datamodels = compute_datamodels(
            RegressionData.load(settings["data.data_path"]),
            num_train=settings["data.num_train"],
            num_val=settings["data.num_val"],
            lambdas=settings["cfg.k"],
            least=settings["cfg.eps"],
            columns=slice(settings["data.target_start_ind"], None if stop == -1 else stop),
            out=settings["cfg.out_dir"],
            progress=report_progress,
        )
    print(f"{settings['cfg.out_dir']}/datamodels.pt: {datamodels}")


if __name__ == "__main__":
    run_command(main)

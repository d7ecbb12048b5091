"""`python -m ...regression.write_dataset --cfg.data_dir DIR --cfg.out_path FILE --cfg.y_name NAME`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep.compat.datamodels._command_line import Flag, collect, run_command

if TYPE_CHECKING:
    from collections.abc import Sequence

FLAGS = (
    Flag("cfg.data_dir", required=True),
    Flag("cfg.out_path", required=True),
    Flag("cfg.y_name", required=True),
    Flag("cfg.x_name", default="masks"),
    Flag("cfg.y_slice", int, default=-1),
    Flag("cfg.completed_name", default="_completed"),
    Flag("cfg.ignore_completed", switch=True),
)


def main(arguments: Sequence[str]) -> None:
    """Write masks and targets of the completed models to one file, without FFCV."""
    from gradkeep.compat.datamodels._npy_folder import NpyFolder
    from gradkeep.compat.datamodels._regression import collect_completed

    settings = collect(FLAGS, arguments)
    column = settings["cfg.y_slice"]
    data = collect_completed(
        NpyFolder.open(settings["cfg.data_dir"]),
        masks=settings["cfg.x_name"],
        outputs=settings["cfg.y_name"],
        column=None if column < 0 else column,
        flags=None if settings["cfg.ignore_completed"] else settings["cfg.completed_name"],
    )
    data.save(settings["cfg.out_path"])
    models, targets = data.targets.shape
    print(f"{settings['cfg.out_path']}: {models} models, {targets} targets")


if __name__ == "__main__":
    run_command(main)

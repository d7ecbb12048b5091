"""Commands and files of the datamodels library, of both its generations, with the same flags.

`python -m datamodels.training.worker ...` becomes `python -m gradkeep.compat.datamodels.training.worker
...`; scripts with `main(*_, index, logdir)`, specs and YAML files stay as they are.
"""

from gradkeep._public import lazy_names

_HOMES = {
    "_npy_folder": (
        *("NpyFolder", "PublishedArrays", "export_folder", "import_folder", "import_published"),
        *("load_memmap", "open_published", "train_row"),
    ),
    "_regression": (
        *("RegressionData", "collect_completed", "compute_datamodels"),
        *("load_weights", "read_log", "save_weights"),
    ),
}
OLD_NAME = (("datamodels", __name__),)
"""Name that scripts import, and its replacement unless that package is installed."""
__all__ = ["OLD_NAME", *(name for names in _HOMES.values() for name in names)]
__getattr__ = lazy_names(
    __name__, {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}
)

"""What a user's script expects around it: its own flags, and modules under their old name."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import Any


def tolerate_other_flags() -> None:
    """If the script uses fastargs, let its configuration skip flags that are not its own."""
    if importlib.util.find_spec("fastargs") is None:
        return
    config = importlib.import_module("fastargs").get_current_config()

    def collect_argparse_args(parser: argparse.ArgumentParser, disable_help: bool = False) -> Any:
        words = [word for word in sys.argv[1:] if not (disable_help and word == "--help")]
        given = vars(parser.parse_known_args(words)[0])
        for file in given.pop("config_file", []):
            config.collect_config_file(file)
        config.collect(given)
        config.collect_env_variables()
        return config

    config.collect_argparse_args = collect_argparse_args


def collect_for_script() -> None:
    """Collect again, now that the script's own sections are known."""
    if importlib.util.find_spec("fastargs") is None:
        return
    config = importlib.import_module("fastargs").get_current_config()
    parser = argparse.ArgumentParser(add_help=False)
    config.augment_argparse(parser)
    config.collect_argparse_args(parser)


def offer_old_name() -> None:
    """Let `import datamodels` find the names here, unless such a package is installed."""
    if "datamodels" not in sys.modules and importlib.util.find_spec("datamodels") is None:
        sys.modules["datamodels"] = importlib.import_module("gradkeep.compat.datamodels")

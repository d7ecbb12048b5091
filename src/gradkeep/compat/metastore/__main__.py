"""`python -m gradkeep.compat.metastore --config ./config.yaml --method ted ...`"""

from __future__ import annotations

import argparse
import sys

from gradkeep.errors import GradkeepError


def main(arguments: list[str] | None = None) -> int:
    """Run one experiment; the flags overwrite what the configuration says, as they always did."""
    parser = argparse.ArgumentParser(prog="python -m gradkeep.compat.metastore")
    parser.add_argument("--config", default="./config.yaml")
    parser.add_argument("--method", default="ted", help="naive, recon, ted or half")
    parser.add_argument("--target_model", default="ResNet50")
    parser.add_argument("--data", default="imagenet")
    parser.add_argument("--num_analyzed_samples", type=int, default=100)
    parser.add_argument("--num_query", type=int, default=1)
    given = parser.parse_args(arguments)
    from gradkeep.compat.metastore._config import read
    from gradkeep.compat.metastore._run import run

    try:
        experiment = read(
            given.config,
            method=given.method,
            target_model=given.target_model,
            data=given.data,
            num_analyzed_samples=given.num_analyzed_samples,
            num_query=given.num_query,
        )
        run(experiment)
    except GradkeepError as error:
        print(f"metastore: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m gradkeep.compat.metastore --config ./config.yaml --method ted ...`."""

from __future__ import annotations

import argparse
import sys

from gradkeep.errors import GradkeepError


def main(arguments: list[str] | None = None) -> int:
    """Run one experiment; flags override the configuration, as in MetaStore."""
    parser = argparse.ArgumentParser(prog="python -m gradkeep.compat.metastore")
    parser.add_argument("--config", default="./config.yaml")
    parser.add_argument("--method", default="ted", help="naive, recon, ted or half")
    parser.add_argument("--target_model", default="ResNet50")
    parser.add_argument("--data", default="imagenet")
    parser.add_argument("--num_analyzed_samples", type=int, default=100)
    parser.add_argument("--num_query", type=int, default=1)
    parser.add_argument(
        "--test_indices", metavar="3,17,20-29", help="these test samples, not the first num_query"
    )
    parser.add_argument(
        "--name", help="keeps gradients and results apart from those of other names"
    )
    parser.add_argument(
        "--weights_only",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="gradients of weights alone, as MetaStore's; with --no-weights_only of biases too",
    )
    options = parser.parse_args(arguments)
    from gradkeep.compat.metastore._config import read
    from gradkeep.compat.metastore._run import run

    flags = vars(options)
    try:
        run(read(flags.pop("config"), **flags))
    except GradkeepError as error:
        print(f"metastore: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"metastore: {error.filename or ''}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # the next run resumes
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

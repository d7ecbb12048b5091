"""`python -m gradkeep`: the same as the `gradkeep` command."""

from gradkeep.cli import main

if __name__ == "__main__":
    main()

"""`python -m eyas` is the `eyas` command."""

from eyas.cli import main

if __name__ == "__main__":
    main()

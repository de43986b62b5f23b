"""`python -m ghor` is the command `ghor`."""

from .lab import main

if __name__ == "__main__":
    main()

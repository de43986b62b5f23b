"""`python -m ghor_lab` is the command `ghor`."""

from . import main

if __name__ == "__main__":
    main()

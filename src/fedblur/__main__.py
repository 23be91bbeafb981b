"""`python -m fedblur`."""

from fedblur.cli import main

if __name__ == "__main__":
    main()

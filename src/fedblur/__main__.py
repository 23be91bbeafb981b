"""`python -m fedblur`."""

from fedblur.cli.app import main

if __name__ == "__main__":
    main()

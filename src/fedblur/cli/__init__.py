"""The command line: `app.py`, and one file per command. Bad input is one line and exit status 2."""


def main() -> None:
    """Run `fedblur`: the entry point that pip installs."""
    from fedblur.cli import app  # later: `import fedblur.cli.output` needs no Typer

    app.main()

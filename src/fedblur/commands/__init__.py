"""The command line, one file per command. Each raises FedBlurError on bad input; cli.main prints it."""

"""`python -m fednotes` is the command `fednotes`."""

from fednotes.cli.app import main

main()

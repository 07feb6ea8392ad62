"""`python -m fednotes` is the command `fednotes`."""

from fednotes.cli import main

main()

"""The command line of fednotes."""

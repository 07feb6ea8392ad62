"""Formats that published corpora came in; they are read, and nothing is written in
them."""

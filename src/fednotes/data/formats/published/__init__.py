"""The formats of published corpora, which are read-only."""

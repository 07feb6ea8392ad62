"""The formats of published corpora; they are read, and never written."""

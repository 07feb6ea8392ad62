"""Corpora and notes: formats, tags, splits, batches and checks of data."""

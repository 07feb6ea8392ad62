"""Repeat the tables and figures of the papers, and compare attention heads."""

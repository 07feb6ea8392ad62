"""Federated learning for clinical text: one model, many sites, notes stay where they are."""

__version__ = "0.1.0"

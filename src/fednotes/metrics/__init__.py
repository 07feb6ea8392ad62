"""Scores of mentions, labels and confidences, and comparisons of models by them."""

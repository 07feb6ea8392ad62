"""Models that find mentions: a kind in each file, on the base in `model.py`."""

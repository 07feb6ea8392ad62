"""The local web UI: a model's errors in one's own notes, and a person's decisions."""

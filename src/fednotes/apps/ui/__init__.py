"""The local page: a model's errors in one's own notes, and what a person decides."""

"""Pretrained encoders: opening them, reading text with them, tuning them."""

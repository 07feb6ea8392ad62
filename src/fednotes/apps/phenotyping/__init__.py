"""Phenotyping of patients after Liu, Dligach and Miller 2019."""

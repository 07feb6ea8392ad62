"""The secure sum, noise, and what a job promises about privacy."""

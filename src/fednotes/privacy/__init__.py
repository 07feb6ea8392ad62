"""The secure sum, noise, and what a job guarantees about privacy."""

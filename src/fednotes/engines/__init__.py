"""The federation behind a method: sites in this process, or real ones."""

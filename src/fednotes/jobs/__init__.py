"""From a job file to sites, a run and its results; prediction and evaluation."""

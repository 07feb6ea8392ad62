"""Job files, the sites and runs of jobs, their results, prediction and evaluation."""

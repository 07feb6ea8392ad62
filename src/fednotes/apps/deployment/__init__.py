"""Federated runs between real sites: policies, approvals, ledgers and carriers."""

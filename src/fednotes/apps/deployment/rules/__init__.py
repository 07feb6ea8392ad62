"""A site's rules: approvals, policy, privacy budget and ledger."""

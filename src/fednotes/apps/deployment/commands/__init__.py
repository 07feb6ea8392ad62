"""Commands of deployments between real sites."""

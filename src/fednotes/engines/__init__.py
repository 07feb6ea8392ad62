"""The engines that run a federation: with sites in this process, or with real sites."""

"""NVIDIA FLARE between real sites: kits, certificates, processes and messages."""

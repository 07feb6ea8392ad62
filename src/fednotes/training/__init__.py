"""What methods share: local training, optimizers, aggregation, compression."""

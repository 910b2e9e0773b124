"""What is measured: models on graphs, with their inputs, targets and limits."""

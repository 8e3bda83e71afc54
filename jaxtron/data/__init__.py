"""Training data: indexed datasets, sampling, blends, batches, tokenizers and preprocessing."""

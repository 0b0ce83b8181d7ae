"""What is computed with weights that are not trained: generation, perplexity, the comparison with transformers."""

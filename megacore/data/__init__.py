"""From texts and examples to the microbatches of a rank: tokenizing, token files, the order of samples, packing."""

"""From hidden states to what the objective needs, without a tensor of tokens × vocabulary."""

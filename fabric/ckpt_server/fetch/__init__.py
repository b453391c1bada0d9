"""Reading state and gradients from checkpoint servers: many sources, every block verified. No torch."""

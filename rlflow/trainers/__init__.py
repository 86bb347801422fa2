"""Training loops. `online` samples from the policy that it trains."""

"""The ways in which ranks share one model, an object each, of which a strategy has any number."""

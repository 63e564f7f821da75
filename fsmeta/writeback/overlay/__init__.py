"""The overlay: what held commits change, on top of the store; validation before they are held."""

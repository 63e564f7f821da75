"""`fsmeta/ops/sessions`."""

"""`Meta`, the facade that the client calls: one method per verb, by theme, and prefetch."""

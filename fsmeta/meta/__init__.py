"""`Meta`, the facade that the client calls: one method per verb, id allocators and prefetch."""

"""What a worker leaves to the next one: the arena in shared memory and what is recorded in it."""

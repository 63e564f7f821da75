"""Work on directory trees through system calls: walking, removing, counting, measuring."""

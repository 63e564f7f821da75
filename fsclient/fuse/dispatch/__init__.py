"""From an opcode to a method of the file system, and from its result to an answer."""

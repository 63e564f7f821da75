"""The driver as a program: its command line, its gRPC server and its numbers."""

"""What two mounts of a volume see of each other."""

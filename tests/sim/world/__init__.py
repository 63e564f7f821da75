"""The simulated world: scheduler, disks, stores, faults, clients."""

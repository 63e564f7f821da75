"""Object stores: the contract, the stores without a server, and wrappers of any store."""

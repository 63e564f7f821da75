"""The metadata store: its contract, typed writes, and engines without a server."""

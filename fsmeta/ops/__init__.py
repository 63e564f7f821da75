"""The POSIX verbs, each written once: `verb(txn, env, …)` reads and writes one transaction.

A verb is pure: it may run several times before it commits, and its only effects are the
transaction's. It raises `OSError` with the errno that the system call of its name returns.
"""

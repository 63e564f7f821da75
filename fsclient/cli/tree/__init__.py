"""Commands on trees: rmr, summary, sync, bench, mdtest."""

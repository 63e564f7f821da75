"""Work on a volume's objects: gc, scrub, packing, verification, restore and objbench."""

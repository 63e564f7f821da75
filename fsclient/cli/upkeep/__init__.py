"""Commands that check and clean: fsck, gc, scrub, restore."""

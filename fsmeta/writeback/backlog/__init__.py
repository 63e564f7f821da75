"""The backlog: entries that wait to be published, in order, and the room that they take."""

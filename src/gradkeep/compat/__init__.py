"""Drop-in interfaces with the names of other systems, implemented by the rest of gradkeep."""

"""MetaStore's command line on gradkeep: the same flags, configuration and method names."""

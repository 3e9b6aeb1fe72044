"""A job in virtual time: the pure cores with everything around them emulated, broken by seed, checked after every event."""

"""The ways into other processes: launchers and Ray."""

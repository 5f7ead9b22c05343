"""The patches, a package a family, a file a patch."""

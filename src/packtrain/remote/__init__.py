"""Files behind URLs: read by ranges, or brought here as copies in the cache folder."""

"""What a recipe says: schema, loading, locating, overriding, explaining. Imports neither torch nor Ray."""

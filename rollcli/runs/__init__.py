"""What a run leaves: directory, manifest, status, events, listing, resume. Imports neither torch nor Ray."""

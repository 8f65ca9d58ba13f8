"""Rules of text games: sources make and demonstrate levels by them, environments play by them."""

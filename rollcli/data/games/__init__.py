"""The rules of text games, shared by the sources that make and demonstrate levels and the environments that play them."""

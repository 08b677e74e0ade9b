"""Flint inside other programs' interfaces; each module imports the program it serves only when used."""

"""Random fleets on real parts: a seed is a script that the stock arm and the patched arm both get."""

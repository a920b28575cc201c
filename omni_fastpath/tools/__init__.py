"""The command line, its output, and the comparison of two settings.

No process of a server imports it.
"""

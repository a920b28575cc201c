"""The command line and its output.

No process of a server imports it.
"""

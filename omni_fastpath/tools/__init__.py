"""What people run beside a server: the command line, what it shows, and the comparison of two settings.

No serving process imports anything of it.
"""

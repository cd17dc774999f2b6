"""What runs inside somebody else's program under ``harness run``.

``on_path/sitecustomize.py`` is the only thing that the program's interpreter finds by itself; it
loads the rest under a private package name (:mod:`harness.inject.alias`), so that a program with
a module called ``harness`` of its own keeps it.
"""

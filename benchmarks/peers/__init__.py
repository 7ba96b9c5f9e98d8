"""Engines behind one line protocol, each in a process and, where needed, a virtual environment of its own."""

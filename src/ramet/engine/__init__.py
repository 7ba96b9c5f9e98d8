"""The engine: groups in, events out. ``engine.Engine.step`` is the table of contents."""
